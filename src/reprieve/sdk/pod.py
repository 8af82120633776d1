"""In the pod: writes the training function into a script, and runs that under `reprieve run`.

    bootstrap.py → start → reprieve run → torchrun → the script, on every rank

The script is the function as it was written, and a call of it. Imports neither the Kubeflow SDK nor torch: images need
neither of them here.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from reprieve.launch.import_hook import finder
from reprieve.launcher_protocol import make_temporary_folder
from reprieve.sdk.request import ANNOTATIONS_AS_TEXT, StartRequest
from reprieve.settings import SETTINGS
from reprieve.submitted_arguments import VARIABLE

SCRIPT = "training_function.py"
"""No name of a package that the function imports: its folder comes first on the path."""
_HEADER = "# The training function of a TrainJob, as it was submitted.\n#\n"
"""Two lines, because Python takes an encoding from the first two, and the file is UTF-8."""
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_PORT")
_NODES = "PET_NNODES"
"""Trainer sets it in pods of runtimes that start ranks by torchrun."""


def start(content: Mapping[str, Any]) -> None:
    """Run the function of a request, and end the process as the training ends."""
    request = StartRequest.from_json(content)
    folder = make_temporary_folder()
    script = folder / SCRIPT
    # Verbatim, also line ends.
    with script.open("w", encoding="utf-8", newline="") as file:
        file.write(script_of(request))
    add_environment(os.environ, request)
    try:
        if request.starts_launcher:
            _launch(script)
        else:
            finder.install()
            sys.argv = [str(script)]
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if not error.code:
            shutil.rmtree(folder, ignore_errors=True)  # `reprieve resume` needs it in all other cases
        raise
    shutil.rmtree(folder, ignore_errors=True)


def script_of(request: StartRequest) -> str:
    """Return the script: the source stays byte for byte as it is, also where it is indented."""
    indented = request.source[:1].isspace()
    source = request.source if request.source.endswith("\n") else f"{request.source}\n"
    call = f"{request.name}(**{request.arguments})" if request.arguments else f"{request.name}()"
    # Processes that DataLoaders and others spawn import the script again.
    main = f'\nif __name__ == "__main__":\n    from math import inf, nan\n\n    {call}\n'
    annotations = ANNOTATIONS_AS_TEXT if request.has_text_annotations else ""
    return _HEADER + annotations + ("if True:\n" if indented else "") + source + main


def add_environment(env: MutableMapping[str, str], request: StartRequest) -> None:
    env[VARIABLE] = request.submitted.to_json()
    for name, value in request.environment.items():
        env.setdefault(name, value)
    if request.run:
        env.setdefault(SETTINGS["name"].env, request.run)


def _launch(script: Path) -> None:
    """Run the launcher in this process: a signal that arrives between two programs would be lost."""
    if _NODES in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", str(script)]
    else:
        command = [sys.executable, str(script)]
        for name in [each for each in os.environ if each in _OF_TORCHRUN or each.startswith("TORCHELASTIC_")]:
            del os.environ[name]  # a torchrun of one rank that has started this process
    sys.argv = ["reprieve", "run", "--", *command]
    runpy.run_module("reprieve", run_name="__main__")
