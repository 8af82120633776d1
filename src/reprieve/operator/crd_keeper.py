"""CrdKeeper: watches the resource definition of TrainJobs, and puts Reprieve's part back when an upgrade of Trainer has
taken it out (`kubernetes/crd_install.py`). Every replica runs one: the patches are guarded, so the slower one finds
nothing to do.
"""

from __future__ import annotations

import asyncio
import logging

from reprieve.errors import NotPermitted, ReprieveError
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.crd import CRD_NAME
from reprieve.kubernetes.crd_install import keep_installed
from reprieve.kubernetes.kinds import CUSTOM_RESOURCE_DEFINITION, Object
from reprieve.operator.log import fields

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
MAX_RETRY_S = 3.0
"""Low: while our part is missing, a job that is created loses its settings, unless it has them in the annotation."""
NOT_PERMITTED_RETRY_S = 60.0
"""On clusters whose definitions nobody may change, jobs have their settings in the annotation. That is no fault."""


class CrdKeeper:
    """Keeps our part in the definition. `run` watches for ever."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._was_missing = False
        self._warned = ""

    async def run(self) -> None:
        """List, then watch from there. However a watch ends, the next list repairs what it has missed."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                version = await self._list()
                retry_s, self._warned = FIRST_RETRY_S, ""
                await self._watch(version)
            except NotPermitted as error:
                self._warn(f"{error}; only the annotation of TrainJobs works")
                await asyncio.sleep(NOT_PERMITTED_RETRY_S)
            except ReprieveError as error:  # of the API, or a definition that this version does not know
                self._warn(f"{error}; trying again")
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _list(self) -> str:
        found, version = await self._api.list_objects(CUSTOM_RESOURCE_DEFINITION, name=CRD_NAME)
        if not found and not self._was_missing:
            log.warning("there is no %s: Kubeflow Trainer is not installed; waiting for it", CRD_NAME)
        self._was_missing = not found
        for crd in found:
            await self._keep(crd)
        return version

    async def _watch(self, version: str) -> None:
        async for event in self._api.watch(CUSTOM_RESOURCE_DEFINITION, name=CRD_NAME, resource_version=version):
            if event.type in ("ADDED", "MODIFIED"):
                await self._keep(event.object)

    async def _keep(self, crd: Object) -> None:
        if await keep_installed(self._api, crd):
            log.info("put spec.checkpointing into the resource definition", extra=fields(name=CRD_NAME))

    def _warn(self, message: str) -> None:
        """Log a message, but not the same one at each attempt."""
        if message != self._warned:
            log.warning("resource definition: %s", message)
        self._warned = message
