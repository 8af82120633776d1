"""Controls what a trainer pushes to the Hub: committed checkpoints only, without Reprieve's files, none after a stop.

Transformers uploads on a thread, one upload after the other, while training continues and the next save writes to the
same folder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import trainer as stock

from reprieve.adapters.transformers.patching import patched
from reprieve.checkpoint.folder import paths
from reprieve.session.session import Session

_HIDDEN = (f"{paths.LEASE_FOLDER}/*", ".checkpoint-*", "previous-*")
_REPRIEVE_FILES = [*_HIDDEN, *(f"train-*/{pattern}" for pattern in (*_HIDDEN, "checkpoint-*"))]
"""Reprieve's files in `output_dir`, as patterns of the Hub. Transformers excludes only `checkpoint-*`: it would publish
the name of this machine, and upload a save in progress, or fail because that is renamed meanwhile."""


class HubPusher:
    """The pushes of one trainer to the Hub."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        for name in ("push_to_hub", "_push_from_checkpoint"):
            original = getattr(trainer, name)
            setattr(trainer, name, functools.wraps(original)(functools.partial(_push_filtered, original)))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep the trainer from pushing what is not committed yet."""
        with patched(self._trainer, "_push_from_checkpoint", lambda *args, **kwargs: None):
            yield

    def push(self, session: Session) -> None:
        """Push the last checkpoint, which is committed. In the grace period there is no time for that."""
        if self._trainer.args.push_to_hub and session.last_saved and session.stop_listener.stop is None:
            self._trainer._push_from_checkpoint(str(paths.checkpoint(session.root, session.last_saved)))

    def stop(self) -> None:
        """Cancel the uploads that are queued."""
        queued = getattr(self._trainer, "push_in_progress", None)
        if queued is not None:
            queued.cancel()


def _push_filtered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call one of the trainer's push methods with uploads that exclude Reprieve's files."""
    owner: Any = stock.hf_api() if hasattr(stock, "hf_api") else stock  # older versions have the function itself
    upload_folder = owner.upload_folder

    def upload(*args: Any, ignore_patterns: Any = (), **kwargs: Any) -> Any:
        return upload_folder(*args, ignore_patterns=[*(ignore_patterns or ()), *_REPRIEVE_FILES], **kwargs)

    with patched(owner, "upload_folder", upload):
        return original(*args, **kwargs)
