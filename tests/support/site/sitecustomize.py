"""Python runs this at the start of each process that a test starts (tests/conftest.py).

Importing transformers' Trainer takes 6 s of CPU time. 2 s of them are collections of garbage, of which there is none,
and 1 s is the end of the process, which would collect it all once more.
"""

import atexit
import gc
import importlib.util
import os
import sys
from collections import defaultdict

gc.set_threshold(100_000, 50, 50)
atexit.register(gc.freeze)
for name in os.environ.get("TESTS_HIDE", "").split():
    sys.modules[name] = None  # type: ignore[assignment]


class _WithoutOperators:
    """Makes DeepSpeed use none of its own operators: it would compile an all-reduce, for a minute."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "deepspeed.ops":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            run(module)
            module.__compatible_ops__ = defaultdict(bool)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("TESTS_COMPILE_NOTHING"):
    sys.meta_path.insert(0, _WithoutOperators())

if "TESTS_RAY_FORKS" in os.environ and any(each.endswith("/setup_worker.py") for each in sys.orig_argv[1:2]):
    from tests.support.ray_forks import become_client

    become_client()
