"""The TLS context of the webhook's server, whose certificate changes while it serves.

A new handshake uses the certificate that was loaded last; connections that are open keep theirs.
"""

from __future__ import annotations

import os
import ssl

from reprieve.errors import ConfigError


class ServingContext:
    """An `ssl.SSLContext` for a server. Until `load` was called, every handshake fails."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded = ("", "")

    @property
    def is_loaded(self) -> bool:
        return self._loaded != ("", "")

    def load(self, certificate: str, key: str) -> bool:
        """Serve this certificate from now on, and return whether it is another one than before. Both are PEM."""
        if (certificate, key) == self._loaded:
            return False
        # Python reads certificates from files only. This one is in memory: no key is ever on a disk.
        file = os.memfd_create("certificate")
        try:
            os.write(file, f"{key}\n{certificate}".encode())
            self.context.load_cert_chain(f"/proc/self/fd/{file}")
        except ssl.SSLError as error:
            raise ConfigError(f"the webhook's certificate and key cannot be used together: {error}") from error
        finally:
            os.close(file)
        self._loaded = (certificate, key)
        return True
