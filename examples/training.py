"""A small training run with a `Checkpointer`, which `make demo` kills and resumes.

    python -m examples.training LOSSES [--checkpoints FOLDER] [--steps 60] [--every 10]

It writes one JSON line per step to LOSSES. With a FOLDER it resumes from the newest valid checkpoint in it.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from torch import nn

from reprieve import Checkpointer

WIDTH = 1024


def train(losses: Path, checkpoints: Path | None, *, steps: int, every: int) -> None:
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(0.1), *hidden, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    checkpointer, first = None, 0
    if checkpoints is not None:
        checkpointer = Checkpointer(checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, every=every)
        resumed = checkpointer.restore()
        first = resumed.step if resumed else 0

    with losses.open("a") as out:
        for step in range(first, steps):
            batch = torch.randn(16, 64)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            out.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
            out.flush()
            if checkpointer is not None:
                checkpointer.save_if_due(step + 1)
    if checkpointer is not None:
        checkpointer.save(steps)
        checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    train(options.losses, options.checkpoints, steps=options.steps, every=options.every)


if __name__ == "__main__":
    main()
