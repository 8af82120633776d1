"""What a checkpoint of DeepSpeed is made of: `latest` names a folder, and that has files of each rank.

    global_step40/mp_rank_00_model_states.pt                     the model, by rank 0; with ZeRO 3 by each rank:
    global_step40/zero_pp_rank_0_mp_rank_00_model_states.pt
    global_step40/zero_pp_rank_0_mp_rank_00_optim_states.pt      with ZeRO, each rank's part of the optimizer

The last begins with `bf16_` where bfloat16 is trained. Stages 1 and 2 of ZeRO divide alike, and have the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

GLOBALS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Types of its own that it pickles: numbers and where a tensor's part lies, and nothing that does anything."""

KINDS = ("DeepSpeed without ZeRO", "ZeRO stage 1 or 2", "ZeRO stage 1 or 2", "ZeRO stage 3")
"""By the stage."""

LATEST = "latest"

_OPTIMIZER = re.compile(r"[^/]+/(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_MODEL = re.compile(r"[^/]+/(?P<part>zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_STATES = re.compile(r".*_(?:optim|model)_states\.pt")


@dataclass(frozen=True, slots=True)
class Partition:
    """How a state is divided among ranks."""

    kind: str
    """One of KINDS."""
    optimizers: int
    """So many ranks have a part of it; 0: it is not divided."""
    models: int
    """The same."""


def partition(files: Iterable[str]) -> Partition | None:
    """`files`: names in a checkpoint's folder. None: it is not DeepSpeed's, or has no model."""
    names = list(files)
    found = [match for name in names if (match := _MODEL.fullmatch(name))]
    if not found:
        return None
    optimizers = sum(_OPTIMIZER.fullmatch(name) is not None for name in names)
    models = sum(match["part"] is not None for match in found)
    return Partition(KINDS[3 if models else 2 if optimizers else 0], optimizers, models)


def is_states(base: str) -> bool:
    """Is it one of its files, by its name?"""
    return _STATES.fullmatch(base) is not None
