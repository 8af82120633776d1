"""`make demo`: preempt and resume two ranks; then kill a run during a save, flip a bit in its checkpoint, resume it.

The first half is `preemption.py`. The second half starts `examples.training` three times: undisturbed, killed with
SIGKILL during a save, and resumed. Tables show what was on disk, what the resumed run logged, and whether all losses
equal those of the undisturbed run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples import preemption
from reprieve.checkpoint.folder.catalog import list_checkpoints

STEPS, EVERY, KILL_AT = 60, 10, 40
TIME_LIMIT_S = 300
console = Console()


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="reprieve-demo-"))
    try:
        preempted = preemption.show(folder / "preemption")
        return demo(folder) or (0 if preempted else 1)
    finally:
        shutil.rmtree(folder)


def demo(folder: Path) -> int:
    checkpoints = folder / "checkpoints"

    with console.status("training, undisturbed"):
        start("undisturbed", folder).wait(TIME_LIMIT_S)
    with console.status(f"training, killed while it saves step {KILL_AT}"):
        killed = start("disturbed", folder, checkpoints)
        kill_in_save(killed, checkpoints / f".checkpoint-{KILL_AT}.saving-1")
    damaged = flip_a_bit(checkpoints / f"checkpoint-{KILL_AT - EVERY}" / "model.safetensors")

    on_disk = Table(title="After SIGKILL during a save, and one flipped bit", title_justify="left")
    for heading in ("name", "what it is"):
        on_disk.add_column(heading)
    for path in sorted(checkpoints.glob(".checkpoint-*")):
        on_disk.add_row(path.name, "the save that was cut short")
    for checkpoint in list_checkpoints(checkpoints):
        note = "one bit flipped by this demo" if checkpoint.path == damaged.parent else "valid"
        on_disk.add_row(checkpoint.path.name, note)
    console.print(on_disk)

    log = folder / "disturbed.log"
    logged_before = len(log.read_text().splitlines())
    with console.status("training, resumed"):
        resumed = start("disturbed", folder, checkpoints)
        resumed.wait(TIME_LIMIT_S)

    logged = Table(title="What the next start logged", title_justify="left", show_header=False)
    for line in startup_lines(log.read_text().splitlines()[logged_before:]):
        logged.add_row(line.replace(f"{checkpoints}/", ""))
    console.print(logged)

    expected, steps = dict(losses(folder / "undisturbed.jsonl")), losses(folder / "disturbed.jsonl")
    # The steps after the checkpoint that was resumed ran twice. The second time must give the same losses.
    equal = sum(expected[number] == loss for number, loss in steps)
    repeated = len(steps) - STEPS
    result = Table(title="Losses against the undisturbed run", title_justify="left")
    for heading in ("steps run", "of which repeated", "equal bit for bit", "exit codes"):
        result.add_column(heading, justify="right")
    result.add_row(
        str(len(steps)), str(repeated), f"{equal} of {len(steps)}", f"{killed.returncode}, {resumed.returncode}"
    )
    console.print(result)
    good = equal == len(steps) and len(steps) >= STEPS and resumed.returncode == 0
    console.print("[green]nothing lost[/]" if good else "[red]something was lost[/]")
    return 0 if good else 1


def start(name: str, folder: Path, checkpoints: Path | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "examples.training", str(folder / f"{name}.jsonl"), "--steps", str(STEPS)]
    if checkpoints is not None:
        command += ["--checkpoints", str(checkpoints), "--every", str(EVERY)]
    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stderr=log)


def startup_lines(lines: list[str]) -> list[str]:
    """The log up to the line that names the checkpoint that the run resumes from."""
    end = next((number for number, line in enumerate(lines) if line.startswith("resum")), len(lines))
    return lines[: end + 1]


def kill_in_save(process: subprocess.Popen[bytes], saving: Path) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (saving / "optimizer.pt").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the training run ended before {saving.name} appeared")
        time.sleep(0.0005)
    process.kill()
    process.wait()


def flip_a_bit(path: Path) -> Path:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return path


def losses(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
