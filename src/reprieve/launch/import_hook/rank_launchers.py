"""Hooks in the programs that start the ranks, torchrun and accelerate: only they know how a rank ended.

    SIGTERM ends a rank  →  its parent reports that to `reprieve run` and ends the other ranks  →  a stop

Without the hooks, a SIGTERM to a rank that does not handle it yet looks like a crash: torchrun exits with 1, or
restarts all ranks in place (`--max-restarts`). The import hook (finder.py) calls these functions in the processes of
torchrun and accelerate.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import weakref
from types import FrameType, TracebackType
from typing import Any

from reprieve.exit_codes import PREEMPTED, is_sigterm
from reprieve.launcher_protocol import Crashed, Terminated, send_once

_STOPS = (signal.SIGTERM, signal.SIGHUP)


def watch_torchrun(module: Any) -> None:
    """Report how ranks ended. `module`: `torch.distributed.elastic.multiprocessing.api`, in the process of torchrun."""
    if not (hasattr(module, "SubprocessContext") and hasattr(module, "_terminate_process_handler")):
        return  # private names, as in torch 2.13: a torchrun without them must still start
    context, handle = module.SubprocessContext, module._terminate_process_handler
    close = context.close
    closed: weakref.WeakSet[Any] = weakref.WeakSet()
    is_stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True
        send_once(Terminated())
        handle(number, frame)  # raises

    @functools.wraps(handle)
    def handle_signal(number: int, frame: FrameType | None) -> None:
        if number not in _STOPS:
            handle(number, frame)
        elif not is_stopping:  # the launcher sends one, too: a second exception would interrupt the stop
            stop(number, frame)

    @functools.wraps(close)
    def close_or_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        # torchrun closes the context after the first failure. Later failures may be its own SIGTERM to the other ranks.
        is_first = self not in closed
        closed.add(self)
        if is_first and self._failures:
            if any(is_sigterm(failure.exitcode) for failure in self._failures.values()):
                stop(signal.SIGTERM, None)
            send_once(Crashed(pids=list(self.pids().values())))
        close(self, *args, **kwargs)

    context.close = close_or_stop
    module._terminate_process_handler = handle_signal
    _hide_traceback_of_stop(module.SignalException)


def watch_accelerate(module: Any) -> None:
    """Exit with 143 after a stop. `module`: `accelerate.commands.launch`, which starts one rank without torchrun."""
    if not hasattr(module, "simple_launcher"):
        return
    launch = module.simple_launcher

    @functools.wraps(launch)
    def simple_launcher(args: Any) -> None:
        is_quiet, args.quiet = args.quiet, False  # in quiet mode it raises nothing and hides the exit code
        try:
            launch(args)
        except subprocess.CalledProcessError as error:
            if is_sigterm(error.returncode):
                sys.exit(PREEMPTED)
            if is_quiet:
                sys.exit(1)
            raise

    module.simple_launcher = simple_launcher


def _hide_traceback_of_stop(signal_exception: type[Exception]) -> None:
    """Hide the traceback of torchrun's uncaught exception at a stop: it would bury the line about what is saved."""
    show = sys.excepthook

    def show_others(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if not (isinstance(error, signal_exception) and getattr(error, "sigval", None) in _STOPS):
            show(kind, error, at)

    sys.excepthook = show_others
