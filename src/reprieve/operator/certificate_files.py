"""CertificateFiles: serves a certificate that others make, such as cert-manager, from the folder where its Secret is
mounted, and loads it again when the kubelet has renewed the files. The caBundle is then the others' work, too.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from reprieve.errors import ConfigError
from reprieve.operator.log import fields
from reprieve.operator.serving_context import ServingContext

log = logging.getLogger(__name__)

CERTIFICATE, KEY = "tls.crt", "tls.key"
"""The keys of a Secret of type `kubernetes.io/tls`."""
POLL_S = 10.0
"""A kubelet takes about a minute to renew the files."""


class CertificateFiles:
    """Keeps the served certificate equal to the files. `run` polls for ever."""

    def __init__(self, folder: Path, serving: ServingContext, *, poll_s: float = POLL_S) -> None:
        self._folder = folder
        self._serving = serving
        self._poll_s = poll_s

    def missing(self) -> str:
        return "" if self._serving.is_loaded else f"no certificate in {self._folder} yet"

    async def run(self) -> None:
        while True:
            try:
                self.sync()
            except ConfigError as error:
                # The two files are renewed together, but a mounted Secret may also be wrong, or not there yet.
                log.warning("certificates: %s; trying again", error)
            await asyncio.sleep(self._poll_s)

    def sync(self) -> None:
        """Load the files, if they have changed."""
        try:
            certificate, key = (self._folder / CERTIFICATE).read_text(), (self._folder / KEY).read_text()
        except OSError as error:
            raise ConfigError(
                f"{error.strerror}: {error.filename}; the Secret needs {CERTIFICATE} and {KEY}"
            ) from error
        if self._serving.load(certificate, key):
            log.info("serving a certificate", extra=fields(folder=self._folder))
