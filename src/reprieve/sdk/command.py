"""The command of a TrainJob that runs a `StartRequest`, and the source of a function that does the same.

The bootstrap and the request are words of the command, or texts in base64: no shell changes a character of them.
"""

from __future__ import annotations

import base64
import inspect

from reprieve.kubernetes.command import BECOMES_LAUNCHER
from reprieve.sdk import bootstrap
from reprieve.sdk.request import StartRequest

_SCRIPT = f"""\
{BECOMES_LAUNCHER}
exec "$(command -v python3 || command -v python)" -c "$1" "$2"
"""


def command_of(request: StartRequest) -> list[str]:
    """Return the command of a container."""
    return ["sh", "-c", _SCRIPT, "reprieve", inspect.getsource(bootstrap), request.pack()]


def function_source(request: StartRequest) -> str:
    """Return the source of a function that runs the request, for backends that submit functions."""
    program = base64.b64encode(inspect.getsource(bootstrap).encode()).decode()
    return (
        f"def {request.name}(*_, **__):\n"
        f"    import base64, sys\n"
        f'    sys.argv[1:] = ["{request.pack()}"]\n'
        f'    exec(base64.b64decode("{program}").decode(), {{"__name__": "__main__"}})\n'
    )
