"""Peculiarities of the streams of Hugging Face `datasets`, which are recognised by their attributes, not imported.

Such a stream has `state_dict` and `load_state_dict`, but its position is not always exact. A loaded position is loaded
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
"""From this version of `datasets` on, positions are exact except with shuffle buffers (tests/unit/data/
test_hf_streams.py). In 4.0 to 4.7 those of batched maps are inexact, in 4.8 those of filters; in 5.0 all are after a
second resume."""


def is_stream(dataset: Any) -> bool:
    return {_LOADED, _STEPS} <= getattr(dataset, "__dict__", {}).keys()


def why_inexact(dataset: Any) -> str | None:
    """Return why the stream's own position would omit or repeat items. None: it is exact, or not such a stream."""
    if not is_stream(dataset):
        return None
    if any(type(step).__name__ == _BUFFER for step in _steps(vars(dataset)[_STEPS])):
        return "has a shuffle buffer, which its state_dict leaves out"
    version = getattr(sys.modules.get("datasets"), "__version__", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _EXACT_SINCE:
        return f"has positions that are not always exact in datasets {version} (in 5.2 they are)"
    return None


def copy_for_one_pass(dataset: Any) -> Any:
    """Return a copy of a stream, into which a position can be loaded without effect on later passes. Other datasets
    are returned as they are."""
    if not is_stream(dataset):
        return dataset
    copy = object.__new__(type(dataset))
    copy.__dict__.update(dataset.__dict__)  # copy.copy would share the dict: that is how they define __setstate__
    return copy


def loaded_position(dataset: Any) -> Any:
    """Return the position that was loaded, and is loaded again at every pass of that epoch; None for other datasets."""
    return vars(dataset)[_LOADED] if is_stream(dataset) else None


def set_loaded_position(dataset: Any, position: Any) -> None:
    if is_stream(dataset):
        setattr(dataset, _LOADED, position)


def _steps(step: Any) -> Iterator[Any]:
    """Yield all steps that the items of a stream go through: map, filter, shuffle, …"""
    yield step
    for inner in (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())):
        if inner is not None:
            yield from _steps(inner)
