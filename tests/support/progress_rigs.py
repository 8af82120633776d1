"""Every sink with its receiver, and a way to see what was published."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from urllib.request import urlopen

from reprieve.progress.sinks.base import Sink
from reprieve.progress.sinks.file import FileSink
from reprieve.progress.sinks.http import HttpSink
from reprieve.progress.sinks.kubeflow import KubeflowSink
from reprieve.progress.sinks.terminal_bar import BarSink
from reprieve.progress.sinks.termination_log import TerminationSink
from tests.support.progress_kit import progress, strict_json
from tests.support.status_server import StatusServer


class Rig:
    """One sink, and a way to see what it has published."""

    sink: Sink

    def seen(self) -> str:
        """All of what was told last; "" if nothing was."""
        raise NotImplementedError

    def break_it(self) -> None:
        """What it tells progress to does not work any more."""
        raise NotImplementedError

    def repair(self) -> None:
        raise NotImplementedError

    def check(self, content: str) -> None:
        """It is whole."""
        strict_json(content)

    def end(self) -> None:
        pass


class FileRig(Rig):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "made by the sink" / "progress.json"
        self.sink = FileSink(self.path, every_steps=1)

    def seen(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def break_it(self) -> None:
        self.path.parent.write_text("a file where the folder should be")

    def repair(self) -> None:
        self.path.parent.unlink()


class TerminationRig(Rig):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "termination-log"
        self.path.touch()
        self.sink = TerminationSink(self.path)

    def seen(self) -> str:
        return self.path.read_text()

    def break_it(self) -> None:
        self.path.unlink()
        self.path.mkdir()

    def repair(self) -> None:
        self.path.rmdir()
        self.path.touch()


class HttpRig(Rig):
    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.sink: HttpSink = HttpSink(self.port)
        self.other: socket.socket | None = None

    def seen(self) -> str:
        if self.sink.port is None:
            return ""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/progress", timeout=10) as answer:
                self.last = answer.read().decode()
        except OSError:  # it is closed: what was told last is what was answered last
            self.last = json.dumps({"step": self.sink._latest[0].step})  # type: ignore[union-attr]
        return self.last

    def break_it(self) -> None:
        self.other = socket.create_server(("127.0.0.1", self.port))

    def repair(self) -> None:
        assert self.other is not None
        self.other.close()

    def end(self) -> None:
        self.sink.close(progress())
        if self.other is not None:
            self.other.close()


class KubeflowRig(Rig):
    def __init__(self, folder: Path) -> None:
        self.server = StatusServer()
        self.sink = KubeflowSink(self.server.environment(folder))
        self.sink._interval_s = 0.0

    def seen(self) -> str:
        return self.server.bodies[-1] if self.server.bodies else ""

    def break_it(self) -> None:
        self.server.status = 500

    def repair(self) -> None:
        self.server.status = 200

    def end(self) -> None:
        self.server.close()


class BarRig(Rig):
    class Terminal(io.StringIO):
        broken = False

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError(5, "the terminal is gone")
            return super().write(text)

    def __init__(self, folder: Path) -> None:
        from rich.console import Console

        self.screen = self.Terminal()
        self.sink = BarSink(Console(file=self.screen, force_terminal=True, width=200))

    def seen(self) -> str:
        return self.screen.getvalue()

    def break_it(self) -> None:
        self.screen.broken = True

    def repair(self) -> None:
        self.screen.broken = False

    def check(self, content: str) -> None:
        assert content.isprintable() or "\x1b" in content
