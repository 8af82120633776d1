"""Why a run failed, as it may be shown to everybody who sees the run: one line, not too long, without secrets.

What the environment calls a secret is hidden, and what looks like one. It errs on the side of hiding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from reprieve.errors import RankFailed
from reprieve.redaction import HIDDEN, VALUE, is_secret

LONGEST = 300
"""Characters. The termination log has 4,096 bytes for everything."""
_SHORTEST = 8
"""Characters of a secret: a shorter value is in many texts by chance."""
_IN_URL = re.compile(r"://[^/\s@]+@")
_SAID = re.compile(
    r"""(?P<name>(token|secret|passw(or)?d|passphrase|credentials?|signature|authorization|(api|access)[-_]?key)
      ["']?\s*[=:]\s*["']?)(bearer\s+|basic\s+)?[^\s"'&,;)]+""",
    re.IGNORECASE | re.VERBOSE,
)
_BEARER = re.compile(r"(?<=Bearer )[\w.\-]{8,}")


def reason(error: BaseException, env: Mapping[str, str] = os.environ) -> str:
    """`RuntimeError: CUDA out of memory`."""
    # Who only heard of another rank's error tells that one.
    told = error.reason if isinstance(error, RankFailed) else _text(error)
    told = _without_secrets(" ".join(told.split()), env)
    return told if len(told) <= LONGEST else f"{told[: LONGEST - 1]}…"


def _text(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - theirs
        said = ""
    return f"{kind}: {said}" if said else kind


def _without_secrets(text: str, env: Mapping[str, str]) -> str:
    for name, value in env.items():
        if len(value) >= _SHORTEST and is_secret(name, value):
            text = text.replace(value, HIDDEN)
    text = _IN_URL.sub(f"://{HIDDEN}@", text)
    text = _SAID.sub(rf"\g<name>{HIDDEN}", text)
    return VALUE.sub(HIDDEN, _BEARER.sub(HIDDEN, text))
