"""Creates the sinks that the settings and the environment of a run request."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reprieve.host import in_pod
from reprieve.progress.pod import addresses
from reprieve.progress.sinks import termination_log
from reprieve.progress.sinks.base import Sink
from reprieve.progress.sinks.file import FileSink
from reprieve.settings import AUTO, OFF, Settings

_forwarding: Sink | None = None
"""Where progress goes in a process whose host publishes it."""


def forward_to(sink: Sink) -> None:
    """Give progress to this sink alone: the host of this process publishes it."""
    global _forwarding  # noqa: PLW0603 - a process has one host
    _forwarding = sink


def make_sinks(settings: Settings, env: Mapping[str, str] = os.environ, *, bar: bool = False) -> list[Sink]:
    """Create the sinks. `bar`: draw a progress bar if there is a terminal. A drill has none: it is not the real run."""
    if settings.drill is not None:
        return []
    if _forwarding is not None:
        return [_forwarding]
    sinks: list[Sink] = []
    if settings.progress_file is not None:
        sinks.append(FileSink(settings.progress_file, every_steps=settings.progress_every))
    if (port := _port(settings.metrics_port, env)) is not None:
        from reprieve.progress.sinks.http import HttpSink

        sinks.append(HttpSink(port, addresses(env)))
    if env.get("KUBEFLOW_TRAINER_SERVER_URL"):
        from reprieve.progress.sinks.kubeflow import KubeflowSink

        sinks.append(KubeflowSink(env))
    if (log := termination_log.path(env)).exists():
        sinks.append(termination_log.TerminationSink(log))
    if bar:
        from reprieve.progress.sinks.terminal_bar import BarSink, terminal

        if (console := terminal()) is not None:
            sinks.append(BarSink(console))
    return sinks


def _port(setting: int | str, env: Mapping[str, str]) -> int | None:
    if setting == AUTO:
        from reprieve.progress.sinks.http import PORT

        return PORT if in_pod(env) else None
    return None if setting == OFF else int(setting)
