"""Choose a few cases of a large matrix so that every two choices occur together at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def everything(choices: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*choices))


def covering(choices: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    rng = random.Random(4)
    cases = everything(choices)
    places = list(itertools.combinations(range(len(choices)), 2))
    uncovered = {(i, a, j, b) for i, j in places for a in choices[i] for b in choices[j]}
    chosen = []

    def new(case: tuple[Any, ...]) -> int:
        return sum((i, case[i], j, case[j]) in uncovered for i, j in places)

    while uncovered:
        best = max(rng.sample(cases, len(cases)), key=new)
        uncovered -= {(i, best[i], j, best[j]) for i, j in places}
        chosen.append(best)
    return chosen
