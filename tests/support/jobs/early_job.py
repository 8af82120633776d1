"""A script that is stopped before it trains: `python early_job.py FOLDER STAGE`. It writes its process id when it has
reached the stage:

- import: in a slow import
- ready: the hook on transformers.trainer has installed its signal handler, and there is no session yet
- checkpointer: it has trained with a `Checkpointer`, which reports no steps
- run: a `reprieve.Run` exists, and no step was trained
- crash: the same, and the last rank fails
- map, run map: as ready and run, and helper processes of `datasets` prepare the data
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

folder, stage = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def wait_here() -> None:
    note = folder / f"new-{rank}"
    note.write_text(f"{os.getpid()}")
    note.rename(folder / f"pid-{rank}")
    time.sleep(60)


def prepare_data() -> None:
    from datasets import Dataset

    # In both helper processes at once: each has a batch.
    Dataset.from_dict({"x": [0, 1]}).map(prepare_row, num_proc=2)


def prepare_row(row: dict[str, int]) -> None:
    (folder / f"helper-{row['x']}").write_text(f"{os.getpid()}")
    time.sleep(60)


if stage == "import":
    (folder / f"slow_{rank}.py").write_text("import __main__\n__main__.wait_here()\n")
    sys.path.insert(0, str(folder))
    __import__(f"slow_{rank}")
elif stage in ("ready", "map"):
    from reprieve.preemption.signals import signal_watch

    signal_watch.install([signal.SIGTERM])
    prepare_data() if stage == "map" else wait_here()
elif stage == "checkpointer":
    from reprieve import Checkpointer

    checkpointer = Checkpointer(folder / "checkpoints", history={})
    checkpointer.save(1)
    wait_here()
elif stage in ("run", "crash", "run map"):
    import torch

    import reprieve

    run = reprieve.Run(folder / "checkpoints", model=torch.nn.Linear(2, 2), exit_wait="1s", notices="off")
    if stage == "crash" and rank == ranks - 1:
        raise RuntimeError("this rank fails")
    prepare_data() if stage == "run map" else wait_here()
