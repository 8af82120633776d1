"""What a notebook sends to a pod: the training function, its arguments, and how to run it.

    TransformersTrainer → StartRequest → zlib, base64: one word of the command → bootstrap.py → pod.py

No shell sees the text, so every character arrives. The bootstrap, which runs before Reprieve is installed, reads the
fields `packages`, `index_urls` and `reprieve`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from reprieve.errors import ConfigError
from reprieve.submitted_arguments import SubmittedArguments

VERSION = 1
ANNOTATIONS_AS_TEXT = "from __future__ import annotations\n"
MAX_PACKED_BYTES = 90 * 1024
"""In base64, 120 KiB. Linux refuses a word of a command line with more than 128 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """One job's function, and how pods run it."""

    name: str
    """Of the function."""
    source: str
    """Of the function, as it was written, with its indentation."""
    arguments: str = ""
    """A Python expression of plain data; empty: the function is called without any."""
    has_text_annotations: bool = False
    """Whether its annotations are not to be evaluated, as in the module that it comes from."""
    run: str = ""
    """Names the run where neither the runtime nor the operator does."""
    packages: tuple[str, ...] = ()
    index_urls: tuple[str, ...] = ()
    reprieve: str = ""
    """The requirement that pip installs where the image has no Reprieve, or an older one."""
    submitted: SubmittedArguments = field(default_factory=SubmittedArguments)
    starts_launcher: bool = True
    """False: this process is a rank already, which somebody else has started."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of that process, where it has none of the name: those of the TrainJob otherwise."""
    version: int = VERSION

    def pack(self) -> str:
        """Return the request as one word. ConfigError: it is too long for a command line."""
        data = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        if len(data) > MAX_PACKED_BYTES:
            raise ConfigError(
                f"func={self.name} takes {len(data) // 1024} KB packed with its arguments, and a command may have "
                f"{MAX_PACKED_BYTES // 1024} KB: put data into a volume, and code into the image or a package"
            )
        return base64.b64encode(data).decode()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StartRequest:
        if content["version"] > VERSION:
            raise ConfigError(
                f"the job was submitted by a newer Reprieve (version {content['version']} of the request, and this one "
                f"reads {VERSION}): install that Reprieve in the image"
            )
        known = {each.name: content[each.name] for each in fields(cls) if each.name in content}
        known["submitted"] = SubmittedArguments(**known["submitted"])
        return cls(**known)
