"""The environment of a process of the job: which rank it is, what a pod leaves out, and where it may write caches."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from reprieve.launch.messages import print_message

_CACHE = ".cache"


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print a message that all ranks would print alike."""
    if is_first_rank():
        print_message(text)


def complete_variables(env: MutableMapping[str, str]) -> None:
    """Add what PyTorchJob leaves out where a pod has one process: without LOCAL_RANK, each would train alone."""
    if env.get("WORLD_SIZE", "1") != "1" and env.get("RANK") and env.get("MASTER_ADDR"):
        env.setdefault("LOCAL_RANK", "0")
        env.setdefault("LOCAL_WORLD_SIZE", "1")


def use_writable_caches(env: MutableMapping[str, str], output: Path) -> None:
    """Put the caches of Hugging Face into the output folder where the usual one cannot be written: a pod's user often
    has no home folder, or a read-only one. Call it before anything imports these libraries.

    A cache that the environment names stays as it is: it may be a read-only one with everything in it.
    """
    if env.get("HF_HOME") or _is_writable(_usual(env)):
        return
    env.setdefault("HF_HUB_CACHE", str(output / _CACHE / "hub"))
    env.setdefault("HF_DATASETS_CACHE", str(output / _CACHE / "datasets"))
    env.setdefault("HF_MODULES_CACHE", str(output / _CACHE / "modules"))


def _usual(env: MutableMapping[str, str]) -> Path | None:
    try:
        return Path(env.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "huggingface"
    except RuntimeError:  # no HOME, and a uid without a passwd entry
        return None


def _is_writable(folder: Path | None) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    if folder is None:
        return False
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
