"""Python runs this at the start of each process that a test starts (tests/conftest.py).

Importing transformers' Trainer takes 6 s of CPU time. 2 s of them are collections of garbage, of which there is none,
and 1 s is the end of the process, which would collect it all once more.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(100_000, 50, 50)
atexit.register(gc.freeze)
for name in os.environ.get("TESTS_HIDE", "").split():
    sys.modules[name] = None  # type: ignore[assignment]
