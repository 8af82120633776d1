"""The names of the files in a checkpoint, for the parts of a state that are not safetensors files."""

from __future__ import annotations

RNG = "rng_state"
"""The part of a state that holds the random number generators."""


def tree_file(name: str, rank: int | None = None) -> str:
    """The file of a part of the state; with `rank`, of that rank's own copy of it."""
    if name == RNG:  # as transformers names it
        return f"{RNG}.pth" if rank is None else f"{RNG}_{rank}.pth"
    return f"{name}.pt" if rank is None else f"{name}.{rank}.pt"


def extras_file(module: str) -> str:
    """The file of the entries of a module's state_dict that safetensors cannot hold."""
    return f"{module}.extra.pt"


def buffers_name(module: str) -> str:
    """The part of a state that holds each rank's own buffers of a module."""
    return f"{module}.buffers"
