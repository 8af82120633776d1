"""The promise that every crash test checks, and a small job to crash.

After any crash: every visible `checkpoint-N` is whole, and the newest of them restores bit for bit to the state of its
step, which is at least the last one that `save` returned for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reprieve import Checkpointer
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify

POOL = BlockPool(limit=4)
RUN = "crash-test"


class Job:
    """A training state that is a function of the step: `at` makes it, `is_at` recognises it."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterDict({"a": torch.zeros(300, 70), "b": torch.zeros(50)})
        self.extra: dict[str, Any] = {"momentum": torch.zeros(300, 70), "seen": 0}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "extra": self.extra}

    def at(self, step: int) -> Job:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for tensor in (*self.model.values(), self.extra["momentum"]):
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.extra["seen"] = step
        return self

    def is_at(self, step: int) -> bool:
        other = Job().at(step)
        return (
            all(
                torch.equal(own, expected)
                for own, expected in zip(self.model.values(), other.model.values(), strict=True)
            )
            and torch.equal(self.extra["momentum"], other.extra["momentum"])
            and self.extra["seen"] == step
        )

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        return Checkpointer(root, name=RUN, rng=False, **{"keep": 2, **options}, **self.state)


def check_visible(root: Path, at_least: int) -> int:
    """Check that every visible checkpoint is whole and that the newest is the state of its step, as stock libraries
    read it. Changes nothing. Returns the newest step, 0 if there is none."""
    found = [info for info in list_checkpoints(root) if paths.step_of(info.path) is not None]
    for info in found:
        verify(info.path, POOL)
    newest = found[0].step if found else 0
    assert newest >= at_least, f"checkpoint-{at_least} was saved, checkpoint-{newest} is the newest"
    if found and found[0].manifest is not None:  # a test may have put something there that is not
        job = Job()
        job.model.load_state_dict(load_file(found[0].path / "model.safetensors"))
        job.extra = torch.load(found[0].path / "extra.pt", weights_only=True)
        assert job.is_at(newest)
    return newest


def check_promise(root: Path, at_least: int) -> int:
    """Check the promise, then start the job as a user would: it resumes where it was, and leftovers are removed."""
    newest = check_visible(root, at_least)
    job = Job()
    with job.checkpointer(root) as checkpointer:
        restored = checkpointer.restore()
        assert (restored.step if restored else 0) == newest
        assert restored is None or (job.is_at(newest) and not restored.passed_over)
    assert not [path.name for path in root.iterdir() if paths.is_leftover(path)]
    return newest
