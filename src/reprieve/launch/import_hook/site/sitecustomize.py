"""Python runs this at the start of every process under `reprieve run`, before the script. It hides the user's own
`sitecustomize`, so it runs that first."""

import os
import sys


def _run_hidden_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH120, PTH100 - pathlib would cost every process 5 ms
    original = list(sys.path)
    this_module = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in original if os.path.abspath(path or ".") != here]  # noqa: PTH100
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this_module is not None:
            sys.modules["sitecustomize"] = this_module
    finally:
        sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100


_run_hidden_sitecustomize()
if os.environ.get("REPRIEVE_LAUNCHER"):
    try:
        from reprieve.launch.import_hook.finder import install
    except ImportError:  # another Python, without Reprieve in it
        pass
    else:
        install()
