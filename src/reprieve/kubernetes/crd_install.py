"""Puts Reprieve's part into the resource definition of TrainJobs on a cluster, and takes it out again.

What is in that part is in `crd.py`, as JSON patches. After a patch, the record of our own field manager is removed from
the definition: with it, Trainer's next `kubectl apply --server-side` or `helm upgrade` would conflict with us. Without
it, that apply succeeds, takes our part out, and the operator puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reprieve.errors import ObjectChanged, ObjectNotFound
from reprieve.kubernetes import crd as definition
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.crd import CRD_NAME, install_patch, removal_patch
from reprieve.kubernetes.kinds import CUSTOM_RESOURCE_DEFINITION, Object

FIELD_MANAGER = "reprieve.dev/operator"
ATTEMPTS = 5
"""Each conflict means that somebody else has changed the definition in the meantime: another replica, or an upgrade."""


async def install(api: KubernetesApi) -> bool:
    """Make the definition have our part, and return whether it had to be changed."""
    return await _change(api, install_patch)


async def remove(api: KubernetesApi) -> bool:
    """Make the definition equal to Trainer's own, and return whether it had to be changed.

    There may be none: Trainer can be uninstalled before Reprieve.
    """
    try:
        return await _change(api, removal_patch)
    except ObjectNotFound:
        return False


async def missing_parts(api: KubernetesApi) -> list[str]:
    """Return what the definition lacks, or has in another version."""
    return definition.missing_parts(await api.get(CUSTOM_RESOURCE_DEFINITION, CRD_NAME))


async def keep_installed(api: KubernetesApi, crd: Object) -> bool:
    """As `install`, for a definition that was just read."""
    return await _change(api, install_patch, crd)


async def _change(
    api: KubernetesApi, patch_of: Callable[[Mapping[str, Any]], list[Object]], crd: Object | None = None
) -> bool:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if crd is None:
                crd = await api.get(CUSTOM_RESOURCE_DEFINITION, CRD_NAME)
            operations = patch_of(crd)
            if operations:
                crd = await api.json_patch(CUSTOM_RESOURCE_DEFINITION, CRD_NAME, operations)
            await _disown(api, crd)
            return bool(operations)
        except ObjectChanged:
            if attempt == ATTEMPTS:
                raise
            crd = None
    raise AssertionError


async def _disown(api: KubernetesApi, crd: Object) -> None:
    """Remove the record of what our field manager has written."""
    records = crd["metadata"].get("managedFields", [])
    # From the back: removing one moves those behind it.
    indices = [index for index, record in enumerate(records) if record.get("manager") == api.field_manager][::-1]
    operations: list[Object] = []
    for index in indices:
        path = f"/metadata/managedFields/{index}"
        operations.append({"op": "test", "path": f"{path}/manager", "value": api.field_manager})
        operations.append({"op": "remove", "path": path})
    if operations:
        await api.json_patch(CUSTOM_RESOURCE_DEFINITION, CRD_NAME, operations)
