"""Which clouds are asked for notices.

By default the one that this machine says it is in, by its DMI strings. Nothing is sent over the network to find out: a
metadata server that is not there costs seconds, and may be somebody else's.
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
"""Of every Azure VM. Its other strings are those of any Hyper-V."""


def detect_clouds(
    choice: str | Sequence[str] = "auto", *, dmi: Path = _DMI, env: Mapping[str, str] = os.environ
) -> list[Cloud]:
    """`"auto"`, `"off"` (or `"none"`), or the names of clouds. `REPRIEVE_METADATA_URL` in `env` is where they are
    asked instead of their own address."""
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
    """None: this machine does not say clearly that it is in one."""

    def says(name: str) -> str:
        try:
            return (dmi / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    # Instances on Xen (p3 and older) call themselves "HVM domU" and have a version like "4.11.amazon".
    if "Amazon EC2" in (says("sys_vendor"), says("bios_vendor")) or says("bios_version").endswith(".amazon"):
        return "aws"
    if says("product_name") == "Google Compute Engine":
        return "gcp"
    if says("chassis_asset_tag") == _AZURE_ASSET_TAG:
        return "azure"
    return None
