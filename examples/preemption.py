"""The first half of `make demo`: preempt two ranks in the middle of training, and resume them.

`plain_pytorch.py` runs undisturbed under torchrun. `plain_pytorch_safe.py` gets SIGTERM, as from a spot reclaim or a
Kubernetes drain, and is started again. Both must print the same losses and accuracies.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent
TIME_LIMIT_S = 300
console = Console()


def show(folder: Path) -> bool:
    folder.mkdir()
    with console.status("two ranks, undisturbed"):
        undisturbed = Torchrun("plain_pytorch.py", folder)
        undisturbed.wait()
    with console.status("two ranks, stopped by SIGTERM"):
        first = Torchrun("plain_pytorch_safe.py", folder)
        lines = len(undisturbed.printed())
        first.wait_for_lines(lines // 3)
        signalled_at = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        first.wait()
        stop_s = time.monotonic() - signalled_at
    with console.status("two ranks, resumed"):
        second = Torchrun("plain_pytorch_safe.py", folder)
        second.wait()

    saved = re.search(r"saved step (\d+) in ([\d.]+) s, ([\d.]+) s after SIGTERM", first.output())
    expected, printed = Counter(undisturbed.printed()), Counter(first.printed() + second.printed())
    equal = sum((expected & printed).values())
    table = Table(
        title="Two ranks under torchrun, SIGTERM in the middle of training", title_justify="left", show_header=False
    )
    table.add_row("stopped at", f"step {saved[1]}" if saved else "?")
    table.add_row("SIGTERM → durable", f"{float(saved[3]) * 1000:.0f} ms" if saved else "?")
    table.add_row("SIGTERM → all processes gone", f"{stop_s:.2f} s")
    table.add_row("lines printed before, after", f"{len(first.printed())}, {len(second.printed())}")
    table.add_row("losses and accuracies equal to the undisturbed run's", f"{equal} of {sum(expected.values())}")
    console.print(table)
    if saved is None or second.process.returncode != 0:
        console.print(first.output() + second.output())
    return saved is not None and expected == printed and second.process.returncode == 0


class Torchrun:
    """An example script on two ranks, and its output."""

    _count = 0

    def __init__(self, script: str, folder: Path) -> None:
        Torchrun._count += 1
        self._log = folder / f"{Torchrun._count}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(EXAMPLES / script)], stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    def wait(self) -> None:
        self.process.wait(TIME_LIMIT_S)

    def wait_for_lines(self, count: int) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while len(self.printed()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the training run ended early:\n{self.output()}")
            time.sleep(0.005)

    def output(self) -> str:
        return self._log.read_text()

    def printed(self) -> list[str]:
        """The losses and accuracies that both ranks printed. Their lines may run into each other."""
        return re.findall(r"epoch \d+ (?:loss \d+\.\d{6}|accuracy \d+\.\d{4})", self.output())
