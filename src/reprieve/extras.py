"""Explains an import that fails because an optional dependency is not installed.

torch is one of them: the launcher, the operator and the commands that list checkpoints work without it. Modules that
need it import it as usual; where users enter them, the import is wrapped in `needing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reprieve.errors import MissingExtra

_EXTRAS = {"torch": "torch", "transformers": "transformers", "accelerate": "transformers"}
"""Package → the extra of Reprieve that installs it."""


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Raise MissingExtra, in one line, where `what` imports an optional dependency that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingExtra(
            f"{what} needs {package}, which is not installed: pip install 'reprieve[{_EXTRAS[package]}]'"
        ) from None
