"""What a trainer pushes to the hub: checkpoints that are committed, nothing of ours beside them, nothing after a stop.

Transformers uploads on a thread, one upload after the other, while training and our next save go on in the same folder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import trainer as stock

from reprieve.adapters.transformers.patching import replaced
from reprieve.checkpoint.folder import paths
from reprieve.session.session import Session

_HIDDEN = (f"{paths.OWNER_FOLDER}/*", ".checkpoint-*", "previous-*")
_OURS = [*_HIDDEN, *(f"train-*/{one}" for one in (*_HIDDEN, "checkpoint-*"))]
"""In `output_dir`, as the hub's patterns have it. Transformers leaves out only `checkpoint-*`: the name of this machine
would be published, and a save that is under way would be uploaded, or be gone before it is."""


class HubPusher:
    """Of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        for name in ("push_to_hub", "_push_from_checkpoint"):
            real = getattr(trainer, name)
            setattr(trainer, name, functools.wraps(real)(functools.partial(_without_ours, real)))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, nothing is pushed: it is not committed yet."""
        with replaced(self._trainer, "_push_from_checkpoint", lambda *args, **kwargs: None):
            yield

    def push(self, session: Session) -> None:
        """The last checkpoint, which is committed. In the grace period there is no time for it."""
        if self._trainer.args.push_to_hub and session.last_saved and session.stop_listener.stop is None:
            self._trainer._push_from_checkpoint(str(paths.checkpoint(session.root, session.last_saved)))

    def stop(self) -> None:
        """What waits for its turn is not uploaded any more."""
        waiting = getattr(self._trainer, "push_in_progress", None)
        if waiting is not None:
            waiting.cancel()


def _without_ours(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    owner: Any = stock.hf_api() if hasattr(stock, "hf_api") else stock  # older versions have the function itself
    upload_folder = owner.upload_folder

    def upload(*args: Any, ignore_patterns: Any = (), **kwargs: Any) -> Any:
        return upload_folder(*args, ignore_patterns=[*(ignore_patterns or ()), *_OURS], **kwargs)

    with replaced(owner, "upload_folder", upload):
        return real(*args, **kwargs)
