"""Positions in data, as a checkpoint holds them: typed here, plain dicts on disk.

    LoaderPosition    what the next pass over a loader depends on
    PassPosition      where a pass is, and how its batches are made

`ResumableLoader` and `Pass` convert at the edge of this package: `to_state` gives numbers, strings, tensors, lists and
dicts, which `torch.load(weights_only=True)` loads. Keys on disk keep their first names (docs/format.md describes
them); a field that has its default is left out.
"""

# ruff: noqa: RUF009 - `_stored` returns a dataclass field

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from reprieve.errors import StateMismatch

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
"""The version of both positions. Raise it when an older reader would misread a position."""

State = Mapping[str, Any]


def _stored(key: str, *, default: Any = None, always: bool = False, decode: Callable[[Any], Any] | None = None) -> Any:
    """A field of a position, and the key that it has on disk. `always`: written even if it has its default."""
    return field(default=default, metadata={"key": key, "always": always, "decode": decode})


class _Stored:
    """A dataclass whose fields are entries of a dict on disk."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_state(self) -> Any:
        state = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.metadata["always"] or value is not part.default:
                state[part.metadata["key"]] = _encode(value)
        return state

    @classmethod
    def from_state(cls, state: Any) -> Self:
        values = {}
        for part in fields(cls):
            key, decode = part.metadata["key"], part.metadata["decode"]
            if key in state:
                values[part.name] = state[key] if decode is None else decode(state[key])
        return cls(**values)


class _Versioned(_Stored):
    """A position that says which version of the format it has. A missing version means version 1."""

    def to_state(self) -> dict[str, Any]:
        return {"version": VERSION, **super().to_state()}

    @classmethod
    def from_state(cls, state: State) -> Self:
        version = state.get("version", 1)
        if version > VERSION:
            raise StateMismatch(
                f"the checkpoint has a data position of version {version}, and this version of Reprieve reads versions "
                f"up to {VERSION}: upgrade Reprieve to resume from it"
            )
        return super().from_state(state)


def _encode(value: Any) -> Any:
    if isinstance(value, _Stored):
        return value.to_state()
    if isinstance(value, list | tuple) and any(isinstance(part, _Stored) for part in value):
        return [_encode(part) for part in value]
    return value


@dataclass(frozen=True, kw_only=True)
class DatasetPosition(_Stored):
    """The position of an iterable dataset that has a `state_dict`, or whose iterator has one."""

    holder: str = _stored("of", always=True)
    """Whose state it is: `dataset` or `iterator`."""
    state: Any = _stored("state", always=True)
    ended: bool = _stored("ended", default=False, always=True)
    """The iteration is over."""


@dataclass(frozen=True, kw_only=True)
class WorkerPosition(_Stored):
    """The state of a worker process after its last consumed batch."""

    rng: State | None = _stored("rng")
    """The worker's global random number generators. None: as its seed made them."""
    dataset: DatasetPosition | None = _stored("data", decode=DatasetPosition.from_state)
    """Where the worker's copy of an iterable dataset is. None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Redistribution(_Stored):
    """The start of the batches of a pass that was redistributed (redistribution.py)."""

    samples: int = _stored("samples", default=0, always=True)
    """Samples that all ranks together had consumed before."""
    first_batch: int = _stored("at", default=0, always=True)
    """The number of the first new batch: the consumed samples count as so many batches."""
    parts: Sequence[int] | None = _stored("parts")
    """The consumed samples of each worker, if workers read parts of a stream."""


@dataclass(frozen=True)
class FetchedAhead(_Stored):
    """Says that accelerate had fetched further batches at the mark. On disk it is its `rng`, or None."""

    rng: State | None
    """The global random number generators before the first of those fetches. None: workers make the batches."""

    def to_state(self) -> State | None:
        return self.rng


def _worker_positions(states: Sequence[State]) -> list[WorkerPosition]:
    return [WorkerPosition.from_state(state) for state in states]


@dataclass(frozen=True, kw_only=True)
class PassPosition(_Versioned):
    """Where a pass is at its last mark. With nothing but `consumed`, the position can still be reached."""

    consumed: int = _stored("consumed", default=0, always=True)
    """Batches of the loader that are consumed."""
    start_rng: State | None = _stored("start")
    """Random number generators when the pass started: the global ones and the loader's own."""
    ended: bool = _stored("ended", default=False)
    """The last batch is consumed."""
    redistribution: Redistribution | None = _stored("dealt", decode=Redistribution.from_state)

    batches_read: int | None = _stored("read")
    """Consumed batches of the DataLoader, since its start or since the redistribution."""
    samples_per_batch: int | None = _stored("size")
    """Samples that such a batch takes from the common order of all ranks. None: it varies."""
    independent_readers: int | None = _stored("apart")
    """For a stream: how many ranks read it independently of each other."""
    batches_by_worker: Sequence[int] | None = _stored("given")
    """For a stream: how many of `batches_read` each worker made."""

    dataset: DatasetPosition | None = _stored("dataset", decode=DatasetPosition.from_state)
    """For a stream that the main process reads."""
    workers: Sequence[WorkerPosition] | None = _stored("workers", decode=_worker_positions)
    """The workers, each after its last consumed batch."""
    workers_at_start: Sequence[WorkerPosition] | None = _stored("workers_at_start", decode=_worker_positions)
    """For a stream: the workers at the start of the pass."""
    last_worker: int | None = _stored("last")
    """For a stream: the worker that made the last consumed batch."""
    workers_reused: bool = _stored("reused", default=True)
    """Persistent workers of an earlier pass make the batches."""

    fetched_ahead: FetchedAhead | None = _stored("ahead", decode=FetchedAhead)
    generators_are_past: bool = _stored("loose", default=False)
    """Batches were yielded after the mark, so the loader's generators are further than the position."""

    loader_state: Any = _stored("loader")
    """What a loader with a `state_dict` of its own returned."""
    iteration: int | None = _stored("iteration")
    """Accelerate's count of passes."""
    first_samples: Sequence[Any] | None = _stored("first")
    """The samples that accelerate's dispatcher fills up the last batch with."""


@dataclass(frozen=True, kw_only=True)
class LoaderPosition(_Versioned):
    """What the next pass over a loader depends on, besides a position in it."""

    generators: State | None = _stored("generators")
    """The loader's own torch generators, by name."""
    seeds: State | None = _stored("seeds")
    """The seeds of accelerate's samplers, by name."""
    samplers: State | None = _stored("samplers")
    """The states of samplers that have a `state_dict`, by name."""
    rng_before_workers: State | None = _stored("made")
    """Random number generators before the persistent workers were made, which took their seeds from them."""
    workers: Sequence[WorkerPosition] | None = _stored("workers", decode=_worker_positions)
    """The persistent workers after the last consumed batch."""
    dataset: Any = _stored("dataset")
    """The state of an iterable dataset that remembers something between passes."""
    iteration: int | None = _stored("iteration")
    """Accelerate's count of passes."""

    @property
    def own_rng(self) -> dict[str, Any]:
        """What `LoaderRng.capture_own` returned."""
        parts = {"generators": self.generators, "seeds": self.seeds, "samplers": self.samplers}
        return {name: part for name, part in parts.items() if part is not None}
