"""The cost of the launcher: how long commands take to start, and how soon a resumed run trains again.

The resume runs one script from a cold page cache, once under `reprieve run` and once under plain `python`, and measures
from the start of the process to the end of its first step. The checkpoint is half as large as the state of the other
figures.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.measure import settle

ROOT = Path(__file__).parents[1]
_REPRIEVE = [str(Path(sys.executable).with_name("reprieve"))]
_STARTS = 15


def figures(folder: Path, rounds: int, size: int) -> dict[str, float]:
    folder = folder / "launch"
    folder.mkdir()
    env = {**os.environ, "REPRIEVE_STATE_DIR": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    found = {
        "launch.help_ms": _start_ms([*_REPRIEVE, "--help"], env),
        "launch.run_true_ms": _start_ms([*_REPRIEVE, "run", "true"], env),
        "peers.plain.launch.run_true_ms": _start_ms(["true"], env),
    }
    job = [sys.executable, "-m", "benchmarks.launch", str(folder), str(size // 2)]
    subprocess.run([*_REPRIEVE, "run", *job], env={**env, "STEPS": "2"}, check=True, capture_output=True)
    ways = {"resume.first_step_s": [*_REPRIEVE, "run", *job], "peers.plain.resume.first_step_s": job}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            seconds[name].append(_first_step_s(ways[name], folder, env))
            print(f"launch: round {number + 1}/{rounds} {name:32} {seconds[name][-1]:.2f} s", file=sys.stderr)
    return {
        name: round(value, 4) for name, value in {**found, **{key: median(one) for key, one in seconds.items()}}.items()
    }


def show(found: dict[str, float]) -> None:
    print(
        f"reprieve --help {found['launch.help_ms']:.0f} ms, reprieve run true {found['launch.run_true_ms']:.0f} ms; "
        f"resumed, until the first step: {found['resume.first_step_s']:.2f} s under reprieve run, "
        f"{found['peers.plain.resume.first_step_s']:.2f} s under python"
    )


def _start_ms(command: list[str], env: dict[str, str]) -> float:
    times = []
    for _ in range(_STARTS):
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        times.append((time.perf_counter() - began) * 1000)
    return median(times)


def _first_step_s(command: list[str], folder: Path, env: dict[str, str]) -> float:
    (folder / "first-step").unlink(missing_ok=True)
    settle()
    began = time.monotonic()
    subprocess.run(command, env={**env, "STEPS": "9"}, check=False, capture_output=True)
    return float((folder / "first-step").read_text()) - began


def _train(folder: Path, size: int) -> None:
    """The script. Its first start saves the checkpoint; each later one resumes from it and trains one step."""
    import torch

    import reprieve

    width = int((size / 4 / 3) ** 0.5)  # float32, and AdamW's two moments
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    run = reprieve.Run(folder / "checkpoints", model=model, optimizer=optimizer, notices="off", every="never")
    for _ in run.epochs(steps=int(os.environ["STEPS"])):
        for _batch in run.batches([torch.zeros(1)] * 4):
            run.step()
            if run.resumed is not None:
                (folder / "first-step").write_text(str(time.monotonic()))
                os._exit(0)  # without a save: the next start finds the same checkpoint


if __name__ == "__main__":
    _train(Path(sys.argv[1]), int(sys.argv[2]))
