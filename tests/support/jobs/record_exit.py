"""Runs a script as a torchrun worker and writes its exit code to a file: torchrun itself does not report it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    # The whole process group gets the signal; the script itself must handle it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    child = subprocess.Popen([sys.executable, *sys.argv[1:]])
    folder = Path(json.loads(sys.argv[2])["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    (folder / f"pid-{rank}").write_text(str(child.pid))
    code = child.wait()
    (folder / f"code-{rank}").write_text(str(code))
    sys.exit(code if code >= 0 else 128 - code)
