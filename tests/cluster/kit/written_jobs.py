"""What was written to a TrainJob, from the record that the rig's API server keeps (rig/control_plane.py)."""

from __future__ import annotations

import json
import re

from tests.cluster.kit.objects import Object
from tests.cluster.rig.layout import Instance

_OF_THE_SERVER = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "namespace")


def writes_of(writer: str, instance: Instance, namespace: str, name: str) -> list[Object]:
    """What users whose name contains `writer` have sent, in order: whole objects (`update`), and merge patches
    (`patch`). Without what differs each time, what the API server adds, and the status, which such requests leave."""
    found = []
    for line in instance.written_jobs.read_text().splitlines():
        event = json.loads(line)
        target = event["objectRef"]
        is_of_job = (target["namespace"], target.get("name"), target.get("subresource")) == (namespace, name, None)
        if is_of_job and writer in event["user"]["username"] and event["responseStatus"]["code"] == 200:
            sent = _without_what_differs(event["requestObject"], name)
            if sent != {"metadata": {}}:
                found.append({"verb": event["verb"], "object": sent})
    return found


def _without_what_differs(sent: Object, name: str) -> Object:
    metadata = {key: value for key, value in sent["metadata"].items() if key not in _OF_THE_SERVER}
    kept: Object = {**sent, "metadata": metadata}
    kept.pop("status", None)
    for patch in kept.get("spec", {}).get("runtimePatches") or ():
        patch.pop("time", None)
    # The name of Kueue's Workload ends with a digest.
    return dict(json.loads(re.sub(rf"trainjob-{name}-\w+", f"trainjob-{name}-12345", json.dumps(kept))))
