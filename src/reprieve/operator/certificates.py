"""The webhook's own serving certificates: which one is served, which are trusted, and when the next one is made.

There is no authority. Each certificate is self-signed for the names of the webhook's Service, and the API server trusts
exactly those that are in the webhook configuration (`caBundle`). All replicas share the pairs of certificate and key
through one Secret (`certificate_keeper.py`), and each decides by the time alone:

    made ──► published in the Secret and the caBundle ──(publication delay)──► served by all replicas
                                                             next one made at 3/5 of its life ──► expires, is dropped

So a certificate is trusted before any replica serves it, and remains trusted until it expires: neither a replica that
lags behind nor an API server that lags behind refuses a request. Everything here is a function of pairs and time.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from reprieve.errors import ConfigError

DEFAULT_LIFE = timedelta(days=90)
MIN_LIFE = timedelta(seconds=10)
"""A shorter life leaves no time to publish a certificate before it is served."""
RENEW_AT = 0.6
"""Of its life: before two thirds of it, however late a replica polls."""
MAX_DELAY = timedelta(seconds=60)
"""Twice the time after which a kubelet or an API server that lags behind usually has caught up."""
POLLS_PER_DELAY = 4
"""How often a replica reads the Secret in a publication delay: before all serve a pair, each has read it."""
MAX_CLOCK_SKEW = timedelta(minutes=5)
"""How far the clock of an API server may be behind that of the node that makes a certificate."""
FORMAT = 1
DATA_KEY = "pairs.json"
"""The key of the Secret's data."""


@dataclass(frozen=True, kw_only=True)
class CertificatePair:
    """A self-signed certificate and its private key."""

    made: datetime
    expires: datetime
    names: tuple[str, ...]
    certificate: str
    """PEM."""
    key: str = field(repr=False)
    """PEM."""

    @property
    def life(self) -> timedelta:
        return self.expires - self.made


def publication_delay(life: timedelta) -> timedelta:
    """Return how long a certificate is published before it is served: 60 s, or a tenth of a short life."""
    return min(MAX_DELAY, life / 10)


def poll_interval(life: timedelta) -> timedelta:
    """Return how often a replica reads the Secret."""
    return publication_delay(life) / POLLS_PER_DELAY


def make_pair(names: Sequence[str], now: datetime, life: timedelta = DEFAULT_LIFE) -> CertificatePair:
    """Make a key, and a certificate for it that is valid for all the names."""
    if life < MIN_LIFE:
        raise ConfigError(f"certificate life {life.total_seconds():g} s: use {MIN_LIFE.total_seconds():g} s or more")
    key = ec.generate_private_key(ec.SECP256R1())
    # Not a Service's name: common names have at most 64 characters, and only the alternative names count.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "reprieve-operator")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - min(MAX_CLOCK_SKEW, life / 10))
        .not_valid_after(now + life)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        # It is its own authority, and signs nothing else.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return CertificatePair(
        made=now,
        expires=now + life,
        names=tuple(names),
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=private.decode(),
    )


def unexpired(pairs: Sequence[CertificatePair], now: datetime) -> tuple[CertificatePair, ...]:
    return tuple(sorted((pair for pair in pairs if pair.expires > now), key=lambda pair: pair.made))


def serving_pair(pairs: Sequence[CertificatePair], now: datetime) -> CertificatePair | None:
    """Return the newest pair that has been published for long enough; where there is none, the oldest."""
    usable = unexpired(pairs, now)
    published = [pair for pair in usable if now - pair.made >= publication_delay(pair.life)]
    return published[-1] if published else usable[0] if usable else None


def ca_bundle(pairs: Sequence[CertificatePair], now: datetime) -> str:
    """Return the certificates that the API server is to trust, in PEM."""
    return "".join(pair.certificate for pair in unexpired(pairs, now))


def is_renewal_due(
    pairs: Sequence[CertificatePair], now: datetime, *, names: Sequence[str], life: timedelta = DEFAULT_LIFE
) -> bool:
    """Return whether a new pair is needed. A new name for the Service, or a shorter life, needs one at once."""
    usable = unexpired(pairs, now)
    if not usable or set(usable[-1].names) != set(names):
        return True
    return now - usable[-1].made >= min(usable[-1].life, life) * RENEW_AT


def encode_pairs(pairs: Sequence[CertificatePair]) -> dict[str, str]:
    """Return the `data` of the Secret."""
    records = [
        {
            "made": pair.made.isoformat(),
            "expires": pair.expires.isoformat(),
            "names": list(pair.names),
            "certificate": pair.certificate,
            "key": pair.key,
        }
        for pair in pairs
    ]
    text = json.dumps({"version": FORMAT, "pairs": records})
    return {DATA_KEY: base64.b64encode(text.encode()).decode()}


def decode_pairs(data: dict[str, str]) -> tuple[CertificatePair, ...]:
    """Read the `data` of the Secret. What cannot be read counts as nothing: new pairs are made, and replace it."""
    try:
        record = json.loads(base64.b64decode(data[DATA_KEY], validate=True))
        if record["version"] != FORMAT:
            return ()
        return tuple(
            CertificatePair(
                made=_time(each["made"]),
                expires=_time(each["expires"]),
                names=tuple(each["names"]),
                certificate=str(each["certificate"]),
                key=str(each["key"]),
            )
            for each in record["pairs"]
        )
    except (KeyError, TypeError, ValueError, binascii.Error):
        return ()


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
