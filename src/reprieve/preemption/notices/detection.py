"""Detects the clouds to poll for notices.

By default that is the cloud that this machine's DMI strings name. Nothing is sent over the network to find out: a
missing metadata server costs seconds, and another host might answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reprieve.errors import ConfigError
from reprieve.preemption.notices.aws import Aws
from reprieve.preemption.notices.azure import Azure
from reprieve.preemption.notices.gcp import Gcp
from reprieve.preemption.notices.poller import Cloud

_CLOUDS: dict[str, Callable[..., Cloud]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}
_OFF = ("off", "none")
_DMI = Path("/sys/class/dmi/id")

_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of every Azure VM. Its other strings are those of any Hyper-V machine."""


def detect_clouds(
    choice: str | Sequence[str] = "auto", *, dmi: Path = _DMI, env: Mapping[str, str] = os.environ
) -> list[Cloud]:
    """Return the clouds for `"auto"`, `"off"` (or `"none"`), or the names of clouds. `REPRIEVE_METADATA_URL` in `env`
    replaces the address of their metadata servers."""
    names = [choice] if isinstance(choice, str) else list(choice)
    if names == ["auto"]:
        names = [here] if (here := _this_cloud(dmi)) else []
    elif len(names) == 1 and names[0] in _OFF:
        names = []
    if any(name not in _CLOUDS for name in names):
        raise ConfigError(f"notices={choice!r}: write 'auto', 'off', or one or more of {', '.join(map(repr, _CLOUDS))}")
    url = env.get("REPRIEVE_METADATA_URL")
    try:
        return [_CLOUDS[name](url) if url else _CLOUDS[name]() for name in dict.fromkeys(names)]
    except ConfigError as error:
        raise ConfigError(f"REPRIEVE_METADATA_URL: {error}") from None


def _this_cloud(dmi: Path) -> str | None:
    """Return the name of the cloud that this machine is in, or None if that is not clear."""

    def dmi_string(name: str) -> str:
        try:
            return (dmi / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    # Instances on Xen (p3 and older) have the product name "HVM domU" and have a version like "4.11.amazon".
    if "Amazon EC2" in (dmi_string("sys_vendor"), dmi_string("bios_vendor")) or dmi_string("bios_version").endswith(
        ".amazon"
    ):
        return "aws"
    if dmi_string("product_name") == "Google Compute Engine":
        return "gcp"
    if dmi_string("chassis_asset_tag") == _AZURE_ASSET_TAG:
        return "azure"
    return None
