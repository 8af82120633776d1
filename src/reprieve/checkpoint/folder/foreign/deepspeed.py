"""The files of a DeepSpeed checkpoint: `latest` names a folder, which holds files of each rank.

    global_step40/mp_rank_00_model_states.pt                     the model, written by rank 0; with ZeRO 3 by each rank:
    global_step40/zero_pp_rank_0_mp_rank_00_model_states.pt
    global_step40/zero_pp_rank_0_mp_rank_00_optim_states.pt      with ZeRO, each rank's part of the optimizer

The last begins with `bf16_` in a bfloat16 training. Stages 1 and 2 of ZeRO divide the state alike and write the same
files.
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
"""DeepSpeed's own types in its pickles. They hold numbers and tensor offsets, and run nothing."""

KINDS = ("DeepSpeed without ZeRO", "ZeRO stage 1 or 2", "ZeRO stage 1 or 2", "ZeRO stage 3")
"""By the ZeRO stage."""

LATEST = "latest"

_OPTIMIZER = re.compile(r"[^/]+/(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_MODEL = re.compile(r"[^/]+/(?P<part>zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_STATES = re.compile(r".*_(?:optim|model)_states\.pt")


@dataclass(frozen=True, slots=True)
class Partition:
    """How a saved state is divided among ranks."""

    kind: str
    """One of KINDS."""
    optimizers: int
    """The number of ranks that hold a part of the optimizer; 0: it is not divided."""
    models: int
    """The number of ranks that hold a part of the model; 0: it is not divided."""


def partition(files: Iterable[str]) -> Partition | None:
    """How the checkpoint with these files is divided. None: DeepSpeed did not write it, or it has no model."""
    names = list(files)
    model_files = [match for name in names if (match := _MODEL.fullmatch(name))]
    if not model_files:
        return None
    optimizers = sum(_OPTIMIZER.fullmatch(name) is not None for name in names)
    models = sum(match["part"] is not None for match in model_files)
    return Partition(KINDS[3 if models else 2 if optimizers else 0], optimizers, models)


def is_states(base: str) -> bool:
    """Whether this is the name of a file with DeepSpeed state."""
    return _STATES.fullmatch(base) is not None
