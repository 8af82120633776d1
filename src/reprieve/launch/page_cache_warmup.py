"""While the command still imports torch, its newest checkpoint is read and checked, so that the restore finds it in
memory. The restore checks it once more: this is for speed, and for a word about a bad one before anybody waits for it.
"""

from __future__ import annotations

import contextlib
import threading

from reprieve.errors import ReprieveError
from reprieve.launch.messages import print_message

_PART = 0.5
"""Of the memory that is free for it."""


class PageCacheWarmup:
    """In the background, from `with` to its end or until `leave_off`."""

    def __init__(self, checkpoints: str | None) -> None:
        """`checkpoints`: the folder, if it is known."""
        self._uri = checkpoints
        self._leave_off = threading.Event()

    def __enter__(self) -> PageCacheWarmup:
        if self._uri is not None:
            threading.Thread(target=self._warm, name="reprieve warm-up", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave_off.set()

    def stop(self) -> None:
        """Somebody else reads it now; two would be slower than one."""
        self._leave_off.set()

    def _warm(self) -> None:
        assert self._uri is not None
        with contextlib.suppress(_Enough, OSError, ReprieveError):
            self._read_newest(self._uri)

    def _read_newest(self, uri: str) -> None:
        from reprieve.checkpoint.buffers.available_memory import available_bytes
        from reprieve.checkpoint.buffers.block_pool import BlockPool
        from reprieve.checkpoint.folder.catalog import list_checkpoints
        from reprieve.checkpoint.folder.retention import reading
        from reprieve.checkpoint.folder.verify import verify
        from reprieve.checkpoint.io.reader import Cache
        from reprieve.errors import InvalidCheckpoint
        from reprieve.storage.uri import local_path

        found = [one for one in list_checkpoints(local_path(uri)) if one.manifest is not None and one.problem is None]
        if self._leave_off.is_set() or not found or found[0].bytes > _PART * available_bytes():
            return
        newest = found[0]
        try:
            with reading(newest.path):
                verify(newest.path, BlockPool(), progress=self._go_on, cache=Cache.FILL)
        except InvalidCheckpoint as error:
            print_message(f"{newest.path.name} is not valid ({error.reason}): the run will go on from an older one")

    def _go_on(self, _: int) -> None:
        if self._leave_off.is_set():
            raise _Enough


class _Enough(Exception):
    """It is not needed any more."""
