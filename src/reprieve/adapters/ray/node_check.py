"""Checks that every node of a run can load Reprieve, before its workers get our callback.

The callback travels to the workers pickled. On a node without Reprieve, or with another version, that fails deep inside
Ray with an error that names neither the node nor the way out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from reprieve import __version__
from reprieve.adapters.ray import internals
from reprieve.errors import ConfigError

log = logging.getLogger("reprieve")

_LIMIT_S = 30.0
"""How long the workers may take to answer. Their processes run already, and the answer is one import of ours."""


def check_nodes(workers: Sequence[Any]) -> None:
    """Raise if a worker cannot load this version of Reprieve. `workers`: Ray's, in the controller."""
    try:
        answers = ray.get([internals.run_on(worker, version_probe()) for worker in workers], timeout=_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - a check that fails must not end a run that might work
        log.warning("could not check the version of Reprieve on the nodes of this run: %s", error)
        return
    nodes = map(internals.address_of, workers)
    if (problem := version_problem(zip(nodes, answers, strict=True))) is not None:
        raise ConfigError(problem)


def version_probe() -> Callable[[], str | None]:
    """Return a function that tells which version of Reprieve a process can load; None: it has none.

    Ray pickles a nested function by value, so a process without Reprieve can run it, too. It imports: code that came
    with a `working_dir` has no metadata.
    """

    def reprieve_version() -> str | None:
        import importlib

        try:
            version: str = importlib.import_module("reprieve").__version__
        except ImportError:
            return None
        return version

    return reprieve_version


def version_problem(versions: Iterable[tuple[str, str | None]]) -> str | None:
    """Return what is wrong with these versions, each with its node's address; None: nothing is."""
    wrong = sorted({f"{node} has {version or 'none'}" for node, version in versions if version != __version__})
    if not wrong:
        return None
    return (
        f"all nodes of a run on Ray need Reprieve {__version__}, as the driver has it: {', '.join(wrong)}. Install it "
        f'there, or let Ray install it: ray.init(runtime_env={{"pip": ["reprieve=={__version__}"]}})'
    )
