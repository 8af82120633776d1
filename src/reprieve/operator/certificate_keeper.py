"""CertificateKeeper: keeps the Secret, the webhook configuration and the served certificate in step.

Every replica runs one and does the same at each poll, in this order: read the webhook configuration, read the Secret,
add a pair to it when one is due, write the caBundle, serve the pair whose turn it is (`certificates.py` decides). Both
writes fail if the object has changed since it was read, so a replica never overwrites what it has not seen. While the
API server is away, the replica continues to serve the pairs that it knows.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone

from reprieve.errors import KubernetesError, ObjectChanged, ObjectNotFound
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.kinds import MUTATING_WEBHOOK_CONFIGURATION, SECRET, Object
from reprieve.operator.certificates import (
    DEFAULT_LIFE,
    CertificatePair,
    ca_bundle,
    decode_pairs,
    encode_pairs,
    is_renewal_due,
    make_pair,
    poll_interval,
    serving_pair,
    unexpired,
)
from reprieve.operator.log import fields
from reprieve.operator.serving_context import ServingContext

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Another replica writes at most twice in a row: a pair and a caBundle."""
MAX_RETRY = timedelta(seconds=5)


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the names under which the API server and others may call a Service."""
    return tuple(f"{service}.{namespace}.svc{domain}" for domain in ("", ".cluster.local"))


class CertificateKeeper:
    """Certificates of the operator's own. `run` polls for ever.

    secret, configuration: the names of the Secret (in `namespace`) and of the MutatingWebhookConfiguration.
    names: the DNS names that the certificates are for.
    """

    def __init__(
        self,
        api: KubernetesApi,
        serving: ServingContext,
        *,
        namespace: str,
        secret: str,
        configuration: str,
        names: Sequence[str],
        life: timedelta = DEFAULT_LIFE,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api = api
        self._serving = serving
        self._namespace = namespace
        self._secret = secret
        self._configuration = configuration
        self._names = tuple(names)
        self._life = life
        self._now = now
        self._pairs: tuple[CertificatePair, ...] = ()
        self._is_published = False

    def missing(self) -> str:
        """Return why the API server cannot call this replica yet, or nothing."""
        if serving_pair(self._pairs, self._now()) is None or not self._serving.is_loaded:
            return "no certificate yet"
        return "" if self._is_published else f"the caBundle of {self._configuration} is not written yet"

    async def run(self) -> None:
        pause = poll_interval(self._life)
        while True:
            try:
                await self.sync()
            except KubernetesError as error:
                log.warning("certificates: %s; trying again", error)
                await asyncio.sleep(min(pause, MAX_RETRY).total_seconds())
            else:
                await asyncio.sleep(pause.total_seconds())

    async def sync(self) -> None:
        """Bring everything into step once."""
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    await self._sync_cluster()
                    return
                except ObjectChanged:  # by another replica: read again
                    if attempt == ATTEMPTS:
                        raise
        finally:
            self._serve()

    async def _sync_cluster(self) -> None:
        # In this order: if the Secret changes after it was read, the configuration that another replica writes then
        # differs from the one that was read here, and writing the older caBundle fails.
        try:
            configuration = await self._api.get(MUTATING_WEBHOOK_CONFIGURATION, self._configuration)
        except ObjectNotFound as error:
            configuration = None
            log.warning("certificates: %s; the API server cannot call the webhook without it", error)
        self._pairs = await self._current_pairs()
        if configuration is not None:
            await self._publish(configuration)

    async def _current_pairs(self) -> tuple[CertificatePair, ...]:
        try:
            secret = await self._api.get(SECRET, self._secret, namespace=self._namespace)
        except ObjectNotFound:
            secret = None
        pairs = decode_pairs((secret or {}).get("data") or {})
        now = self._now()
        if not is_renewal_due(pairs, now, names=self._names, life=self._life):
            return pairs
        pairs = (*unexpired(pairs, now), make_pair(self._names, now, self._life))
        await self._store(pairs, secret)
        log.info("made a certificate", extra=fields(expires=pairs[-1].expires.isoformat(), trusted=len(pairs)))
        return pairs

    async def _store(self, pairs: Sequence[CertificatePair], secret: Object | None) -> None:
        data = encode_pairs(pairs)
        if secret is None:
            new = {"metadata": {"name": self._secret, "namespace": self._namespace}, "type": "Opaque", "data": data}
            await self._api.create(SECRET, new, namespace=self._namespace)
        else:
            await self._api.replace(SECRET, {**secret, "data": data}, namespace=self._namespace)

    async def _publish(self, configuration: Object) -> None:
        bundle = base64.b64encode(ca_bundle(self._pairs, self._now()).encode()).decode()
        version = configuration["metadata"]["resourceVersion"]
        changes: list[Object] = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index, webhook in enumerate(configuration.get("webhooks", []))
            if webhook["clientConfig"].get("caBundle") != bundle
        ]
        if changes:
            unchanged = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            await self._api.json_patch(MUTATING_WEBHOOK_CONFIGURATION, self._configuration, [unchanged, *changes])
            log.info("wrote the caBundle", extra=fields(webhooks=len(changes), trusted=len(self._pairs)))
        self._is_published = True

    def _serve(self) -> None:
        pair = serving_pair(self._pairs, self._now())
        if pair is not None and self._serving.load(pair.certificate, pair.key):
            log.info("serving a certificate", extra=fields(expires=pair.expires.isoformat()))
