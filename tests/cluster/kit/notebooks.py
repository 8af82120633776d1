"""Executes a notebook of examples/ against the cluster, with small stand-ins in its cell of parameters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat

from tests.cluster.kit.cluster import Cluster

LIMIT_S = 280
_EXECUTE = (
    "import sys, nbformat; from nbclient import NotebookClient\n"
    "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
    "try:\n"
    "    NotebookClient(notebook, timeout=240, kernel_name='python3', resources={'metadata': {'path': sys.argv[2]}})"
    ".execute()\n"
    "finally:\n"
    "    nbformat.write(notebook, sys.argv[1])\n"
)
"""The kernel is a child of this process, in the network of the cluster, and its sockets are on the loopback there."""


def execute(cluster: Cluster, notebook: Path, folder: Path, environment: dict[str, str], **parameters: Any) -> str:
    """Execute all cells, and return all that they have printed. `folder`: where the notebook runs."""
    content = nbformat.read(notebook, as_version=4)
    [cell] = [each for each in content.cells if "parameters" in each.metadata.get("tags", ())]
    names = {line.partition(" = ")[0] for line in cell.source.splitlines()}
    assert parameters.keys() <= names, f"{notebook.name} has no {parameters.keys() - names}"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    copy = folder / notebook.name
    nbformat.write(content, copy)
    words = [f"{name}={value}" for name, value in environment.items()]
    done = cluster.run("env", *words, sys.executable, "-W", "ignore", "-c", _EXECUTE, str(copy), str(folder))
    texts = [
        each.get("text") or json.dumps(each.get("data", {})) + "".join(each.get("traceback", ()))
        for each in json.loads(copy.read_text())["cells"]
        if each["cell_type"] == "code"
        for each in each["outputs"]
    ]
    printed = "\n".join("".join(text) if isinstance(text, list) else text for text in texts)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{printed[-6000:]}"
    return printed


def command_in(folder: Path, name: str, command: list[str]) -> str:
    """Make a program that runs a command, in a folder, and return the PATH with it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    (folder / name).chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
