"""The reason of a failure for everybody who can see the run, without secrets: on one short line, or whole.

Values of secret environment variables are hidden, and so is text that looks like a secret. When in doubt, it is hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from reprieve.errors import RankFailed
from reprieve.progress.redaction import HIDDEN, VALUE, is_secret

MAX_LENGTH = 300
"""Characters. The termination log has 4,096 bytes for everything."""
_MIN_SECRET_LENGTH = 8
"""Shorter values occur in many texts by chance."""
_URL_CREDENTIALS = re.compile(r"://[^/\s@]+@")
_ASSIGNMENT = re.compile(
    r"""(?P<name>(token|secret|passw(or)?d|passphrase|credentials?|signature|authorization|(api|access)[-_]?key)
      ["']?\s*[=:]\s*["']?)(bearer\s+|basic\s+)?[^\s"'&,;)]+""",
    re.IGNORECASE | re.VERBOSE,
)
_BEARER = re.compile(r"(?<=Bearer )[\w.\-]{8,}")


def reason(error: BaseException, env: Mapping[str, str] = os.environ) -> str:
    """Return the reason, such as `RuntimeError: CUDA out of memory`."""
    text = without_secrets(" ".join(_text(error).split()), env)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


def whole_reason(error: BaseException, env: Mapping[str, str] = os.environ) -> str:
    """Return the reason with its line breaks, however long it is."""
    return without_secrets(_text(error), env)


def _text(error: BaseException) -> str:
    if isinstance(error, RankFailed):
        return error.reason  # the error of the rank that failed first
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a foreign class
        message = ""
    return f"{kind}: {message}" if message else kind


def without_secrets(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the text with its secrets hidden."""
    for name, value in env.items():
        if len(value) >= _MIN_SECRET_LENGTH and is_secret(name, value):
            text = text.replace(value, HIDDEN)
    text = _URL_CREDENTIALS.sub(f"://{HIDDEN}@", text)
    text = _ASSIGNMENT.sub(rf"\g<name>{HIDDEN}", text)
    return VALUE.sub(HIDDEN, _BEARER.sub(HIDDEN, text))
