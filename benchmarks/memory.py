"""The memory that one blocking save takes in a new process: `python -m benchmarks.memory NAME BYTES FOLDER`.

The peak of the resident set during the save, less the resident set before the Checkpointer existed. MiB on stdout.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

OURS = "reprieve"
_ROOT = Path(__file__).parents[1]


def extra_mib(name: str, size: int, folder: Path) -> float:
    """Measure it in a new process."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", name, str(size), str(folder)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(done.stdout)


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure(name: str, size: int, folder: Path) -> float:
    from benchmarks.peers import PEERS, flush
    from benchmarks.state import TrainingState, shape_of
    from reprieve import Checkpointer

    state = TrainingState(shape_of(size))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the set-up left in the allocator would hide what the save takes
    Path("/proc/self/clear_refs").write_text("5\n")  # VmHWM starts again from here
    before = _status_kib("VmRSS")
    if name == OURS:
        Checkpointer(folder, keep=1, **state.parts()).save(1)
    else:
        PEERS[name].save(state, folder)
        flush(folder)
    return (_status_kib("VmHWM") - before) / 1024


if __name__ == "__main__":
    print(_measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
