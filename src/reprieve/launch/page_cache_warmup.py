"""Reads and verifies the newest checkpoint while the command still imports torch.

The restore then finds it in memory, and verifies it again. The warm-up saves time and reports damage early. In a job
with several nodes each reads what its own ranks will read.
"""

from __future__ import annotations

import contextlib
import threading

from reprieve.errors import ReprieveError
from reprieve.launch.messages import print_message
from reprieve.launch.node_share import NodeShare

_MAX_MEMORY_FRACTION = 0.5
"""Of the available memory."""


class PageCacheWarmup:
    """A warm-up in the background, from the start of its `with` block to the end or until `stop`."""

    def __init__(self, checkpoints: str | None, share: NodeShare | None = None) -> None:
        """`checkpoints`: the folder, if it is known. `share`: this node's part of the job; default: all of it."""
        self._uri = checkpoints
        self._share = share or NodeShare()
        self._stopped = threading.Event()

    def __enter__(self) -> PageCacheWarmup:
        if self._uri is not None and self._share.node is not None:
            threading.Thread(target=self._warm, name="reprieve warm-up", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()

    def stop(self) -> None:
        """Stop reading: the restore reads the checkpoint now, and two readers would be slower than one."""
        self._stopped.set()

    def _warm(self) -> None:
        assert self._uri is not None
        with contextlib.suppress(_Stopped, OSError, ReprieveError):
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

        valid = [
            checkpoint
            for checkpoint in list_checkpoints(local_path(uri))
            if checkpoint.manifest is not None and checkpoint.problem is None
        ]
        if self._stopped.is_set() or not valid:
            return
        newest = valid[0]
        if newest.bytes / self._share.nodes > _MAX_MEMORY_FRACTION * available_bytes():
            return
        try:
            with reading(newest.path):
                verify(
                    newest.path,
                    BlockPool(),
                    progress=self._check_stopped,
                    cache=Cache.FILL,
                    select=self._share.has_span,
                )
        except InvalidCheckpoint as error:
            print_message(
                f"{newest.path.name} is not valid ({error.reason}): the run will resume from an older checkpoint"
            )

    def _check_stopped(self, _: int) -> None:
        if self._stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The warm-up is not needed any more."""
