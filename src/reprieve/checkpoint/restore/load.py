"""Loads the training state of one rank from one checkpoint, in three stages that `ResumeJob` drives.

    prepare   compare the saved state with the live one: every mismatch is found before a byte of live state changes
    read      one verified pass over all files, straight into live memory where possible
    apply     call `load_state_dict` where there is one; the random number generators come last

If the read finds a bad block, live memory may be half overwritten. The caller then restores everything from an older
checkpoint or gives up. It never trains on the mixture.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.buffers.gc_pause import collection_paused
from reprieve.checkpoint.format.file_names import RNG, buffers_name, tree_file
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.checkpoint.io.reader import Cache, CooperativeRead, Reader
from reprieve.checkpoint.restore.comparison import Comparison
from reprieve.checkpoint.restore.module_loader import ApplyStep, ModuleLoader
from reprieve.checkpoint.restore.source import CheckpointSource
from reprieve.checkpoint.state.state import VALUES, Sharing, State
from reprieve.errors import StateMismatch
from reprieve.rng import check_rng, restore_rng

log = logging.getLogger("reprieve")

_MIN_SHARED_BYTES = 2**20
"""Every rank reads smaller files itself: that is quicker than agreeing on who reads what."""


class StateLoader:
    """The restore of one rank's state from one checkpoint."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None,
        state: State,
        pool: BlockPool,
        *,
        strict: bool = True,
        rng: bool = True,
        verify_all_files: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._state = state
        self._reader = Reader(
            folder,
            pool,
            block_bytes=manifest.block_bytes if manifest else BLOCK_BYTES,
            cache=Cache.FILL if verify_all_files else Cache.USE,
        )
        self._source = CheckpointSource(folder, manifest, self._reader)
        self._comparison = Comparison(folder, strict=strict)
        self._verify_all_files = verify_all_files
        self._rng = rng
        self._rank = rank
        self._world_size = world_size
        self._apply: list[ApplyStep] = []
        self._values: dict[str, Any] = {}

    def __enter__(self) -> StateLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)

    def prepare(self) -> list[str]:
        """Compare, and request what is needed from the reader. Returns the files that every rank needs whole: ranks
        may share the work of reading those."""
        with collection_paused():
            self._prepare()
        if self._world_size == 1 or self._manifest is None:
            return []
        names = (*self._state.stateful, *self._state.plain, VALUES, RNG)
        own = {self._own_file(name) for name in names if self._state.sharing(name) is Sharing.OWN}
        return [
            file.name
            for file in self._reader.files()
            if not file.only_targets and file.name not in own and file.size >= _MIN_SHARED_BYTES
        ]

    def read(
        self,
        shared: Collection[str] = (),
        *,
        together: CooperativeRead | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read and verify all that was requested; `shared` files together with the other ranks."""
        for file in self._reader.files():
            file.shared = file.name in shared
        self._reader.run(together=together, progress=progress)
        for check in self._source.checks:
            check()

    def apply(self) -> dict[str, Any]:
        """Hand the state to the live objects. Returns the plain values that were saved with it."""
        for step in self._apply:
            step()
        return self._values

    @property
    def from_medium(self) -> bool:
        """Whether every byte came from the storage medium, and none from the page cache."""
        return self._reader.from_medium

    # Preparing

    def _prepare(self) -> None:
        if self._manifest is not None:
            self._prepare_verification(self._manifest)
        for name, module in self._state.modules.items():
            loader = ModuleLoader(self._source, self._comparison, name, module)
            self._apply += loader.prepare(self._own_buffers_file(name))
        for name, obj in self._state.stateful.items():
            params = [param for group in getattr(obj, "param_groups", ()) for param in group["params"]]
            self._prepare_tree(name, obj.state_dict(), obj.load_state_dict, params)
        for name, obj in self._state.plain.items():
            self._prepare_tree(name, obj, partial(_restore_in_place, obj))
        if self._file_of(VALUES) is not None:
            self._prepare_tree(VALUES, {}, self._values.update)
        if self._rng or self._state.generators:
            self._prepare_rng()

    def _prepare_verification(self, manifest: Manifest) -> None:
        # All files are verified, whether or not this state needs them; in a job of several ranks by one rank per host.
        if self._world_size == manifest.world_size == 1 or (self._verify_all_files and _is_first_on_host()):
            for name in manifest.files:
                self._source.open(name)
        self._comparison.check_keys("the state", set(manifest.state), set(self._state.names))
        if manifest.world_size != self._world_size:
            log.warning(
                "%s was written by %d ranks, this run has %d: random numbers and data will not continue exactly",
                self._folder,
                manifest.world_size,
                self._world_size,
            )

    def _prepare_tree(
        self, name: str, live: Any, load: Callable[[Any], object], params: Sequence[torch.Tensor] = ()
    ) -> None:
        file = self._file_of(name)
        if file is None:
            self._comparison.report_missing(name, tree_file(name))
            return
        tree = self._source.load_tree(file, live, params)
        self._comparison.check_tree(name, tree, live)
        self._apply.append(lambda: _load(name, load, tree))

    def _prepare_rng(self) -> None:
        file = self._own_file(RNG)
        if file is not None:
            with _numpy_allowed():
                saved = self._source.load_tree(file, {})
            check_rng(saved, self._state.generators, everything=self._rng)
            self._apply.append(lambda: restore_rng(saved, self._state.generators, everything=self._rng))
        else:
            log.warning("%s has no %s: random numbers will not continue where they were", self._folder, tree_file(RNG))

    # Files

    def _own_file(self, name: str) -> str | None:
        """The file of a tree that each rank saves for itself: this rank's, or the best substitute for it."""
        has, own = self._source.has, tree_file(name, self._rank)
        if has(own):
            return own
        if self._rank == 0:
            substitutes: tuple[str, ...] = (tree_file(name),)
        elif name == RNG:
            substitutes = ()  # two ranks must not draw the same random numbers
        else:  # saved by fewer ranks, or by a single process
            substitutes = (tree_file(name), tree_file(name, 0))
        return next((file for file in substitutes if has(file)), None)

    def _file_of(self, name: str) -> str | None:
        if self._state.sharing(name) is Sharing.OWN:
            return self._own_file(name)
        return file if self._source.has(file := tree_file(name)) else None

    def _own_buffers_file(self, module: str) -> str | None:
        """The file of the buffers that each rank keeps for itself, where the same number of ranks saved them."""
        file = tree_file(buffers_name(module), self._rank)
        if module not in self._state.own_buffers or not self._source.has(file):
            return None
        return file if self._manifest is not None and self._manifest.world_size == self._world_size else None


def _load(name: str, load: Callable[[Any], object], tree: Any) -> None:
    try:
        load(tree)
    except (ValueError, KeyError, RuntimeError) as error:
        raise StateMismatch(f"{name} does not accept what was saved: {error}") from error


def _restore_in_place(live: Any, saved: Any) -> None:
    if isinstance(live, torch.Tensor):
        live.detach().copy_(saved)
    else:
        live.clear()
        (live.update if isinstance(live, dict) else live.extend)(saved)


@contextlib.contextmanager
def _numpy_allowed() -> Iterator[None]:
    """Allow numpy's array types: stock RNG files hold numpy's state as an array, which is data and not code."""
    try:
        import numpy as np
    except ImportError:
        yield
        return
    rebuild: Any = np.empty(0).__reduce__()[0]
    # Under both names: numpy 1 and numpy 2 pickle different ones.
    names = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals([np.ndarray, np.dtype, type(np.dtype(np.uint32)), *names]):
        yield


def _is_first_on_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
