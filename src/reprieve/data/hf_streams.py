"""What is peculiar to the streams of Hugging Face `datasets`. They are recognised by their attributes, not imported.

Such a stream has `state_dict` and `load_state_dict`, but its position is not always exact, and once loaded it is loaded
again at the start of every later pass of the same epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_LOADED = "_starting_state_dict"
_STEPS = "_ex_iterable"
_BUFFER = "BufferShuffledExamplesIterable"
_EXACT_SINCE = (5, 2)
"""From this version of `datasets` on, positions are exact but for shuffle buffers (tests/unit/test_data_streams.py). In
4.0 to 4.7 those of batched maps are not, in 4.8 those of filters; in 5.0 none are after a second resume."""


def is_stream(dataset: Any) -> bool:
    return {_LOADED, _STEPS} <= getattr(dataset, "__dict__", {}).keys()


def why_inexact(dataset: Any) -> str | None:
    """Why its own position would leave out, or repeat, items of this stream; None: it is exact, or no such stream."""
    if not is_stream(dataset):
        return None
    if any(type(step).__name__ == _BUFFER for step in _steps(vars(dataset)[_STEPS])):
        return "has a shuffle buffer, which its state_dict leaves out"
    version = getattr(sys.modules.get("datasets"), "__version__", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _EXACT_SINCE:
        return f"has positions that are not always exact in datasets {version} (in 5.2 they are)"
    return None


def for_one_pass(dataset: Any) -> Any:
    """What a position can be loaded into without a trace in later passes. Other datasets are themselves."""
    if not is_stream(dataset):
        return dataset
    copy = object.__new__(type(dataset))
    copy.__dict__.update(dataset.__dict__)  # copy.copy would share the dict: that is how they define __setstate__
    return copy


def loaded_position(dataset: Any) -> Any:
    """What was loaded, and is loaded again at every pass of that epoch; None for other datasets."""
    return vars(dataset)[_LOADED] if is_stream(dataset) else None


def set_loaded_position(dataset: Any, position: Any) -> None:
    if is_stream(dataset):
        setattr(dataset, _LOADED, position)


def _steps(step: Any) -> Iterator[Any]:
    """All steps that the items of a stream go through: map, filter, shuffle, …"""
    yield step
    for inner in (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())):
        if inner is not None:
            yield from _steps(inner)
