"""Which sinks a run has: those that its settings and its surroundings ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reprieve.progress.pod import addresses, in_pod
from reprieve.progress.sinks import termination_log
from reprieve.progress.sinks.base import Sink
from reprieve.progress.sinks.file import FileSink
from reprieve.settings import AUTO, OFF, Settings


def make_sinks(settings: Settings, env: Mapping[str, str] = os.environ, *, bar: bool = False) -> list[Sink]:
    """`bar`: one is wanted, if there is a terminal. A drill tells nothing: it is not the run that others follow."""
    if settings.drill is not None:
        return []
    found: list[Sink] = []
    if settings.progress_file is not None:
        found.append(FileSink(settings.progress_file, every_steps=settings.progress_every))
    if (port := _port(settings.metrics_port, env)) is not None:
        from reprieve.progress.sinks.http import HttpSink

        found.append(HttpSink(port, addresses(env)))
    if env.get("KUBEFLOW_TRAINER_SERVER_URL"):
        from reprieve.progress.sinks.kubeflow import KubeflowSink

        found.append(KubeflowSink(env))
    if (log := termination_log.path(env)).exists():
        found.append(termination_log.TerminationSink(log))
    if bar:
        from reprieve.progress.sinks.terminal_bar import BarSink, terminal

        if (console := terminal()) is not None:
            found.append(BarSink(console))
    return found


def _port(asked: int | str, env: Mapping[str, str]) -> int | None:
    if asked == AUTO:
        from reprieve.progress.sinks.http import PORT

        return PORT if in_pod(env) else None
    return None if asked == OFF else int(asked)
