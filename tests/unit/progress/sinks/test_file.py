"""The progress file: other programs can read it at any moment."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.progress.formats import progress_json
from reprieve.progress.sinks.file import FileSink
from reprieve.progress.snapshot import Checkpoints
from reprieve.storage.disk import Disk
from tests.support.helpers import FakeClock
from tests.support.progress_kit import progress, strict_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "down" / "progress.json"


@pytest.fixture(params=[0o000, 0o077, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_everybody_may_read_it_whatever_the_umask(path: Path) -> None:
    sink = FileSink(path)
    for step in (1, 2):
        sink.update(progress(step=step))
        assert path.stat().st_mode & 0o777 == 0o644


def test_nothing_else_is_left_in_its_folder(path: Path) -> None:
    sink = FileSink(path)
    for step in range(5):
        sink.update(progress(step=step))
    assert list(path.parent.iterdir()) == [path]


def test_only_what_a_killed_writer_left_behind_is_removed(path: Path) -> None:
    path.parent.mkdir(parents=True)
    left, live, foreign = (path.parent / name for name in (f".{path.name}.7.new", f".{path.name}.8.new", ".other.new"))
    for file in (left, live, foreign):
        file.write_text("{")
    for file in (left, foreign):
        os.utime(file, (1, 1))
    FileSink(path).update(progress())
    assert sorted(path.parent.iterdir()) == sorted([path, live, foreign])


def test_two_pods_with_equal_pids_do_not_write_to_the_same_file(path: Path) -> None:
    class Other(Disk):
        """The other pod writes after this one has created its temporary file, and before it is renamed."""

        def rename(self, source: Path, target: Path) -> None:
            FileSink(path).update(progress(step=2))
            super().rename(source, target)

    FileSink(path, disk=Other()).update(progress(step=1))
    assert strict_json(path.read_text())["step"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_never_sees_half_of_it(path: Path) -> None:
    sink = FileSink(path)
    sink.update(progress())
    over = threading.Event()

    def write() -> None:
        step = 0
        while not over.is_set():
            step += 1
            sink.update(progress(step=step, train={"x" * (step % 1000): 1.0}))

    writing = threading.Thread(target=write)
    writing.start()
    for _ in range(2000):
        assert strict_json(path.read_text())["totalSteps"] == 300
    over.set()
    writing.join()


def test_what_was_there_stays_when_a_write_fails(path: Path) -> None:
    from tests.support.helpers import FailingDisk

    for at in range(3):
        FileSink(path).update(progress(step=1))
        with pytest.raises(OSError, match="Input/output error"):
            FileSink(path, disk=FailingDisk(at)).update(progress(step=2))
        assert strict_json(path.read_text())["step"] == 1


def test_after_so_many_steps(path: Path, clock: FakeClock) -> None:
    sink, written = FileSink(path, every_steps=5, clock=clock), []
    for step in range(1, 21):
        sink.update(progress(step=step))
        written.append(json.loads(path.read_text())["step"])
    assert sorted(set(written)) == [1, 6, 11, 16]


def test_or_after_some_time_if_there_is_news(path: Path, clock: FakeClock) -> None:
    sink = FileSink(path, every_steps=1000, clock=clock)
    sink.update(progress())
    path.unlink()
    clock.advance(60.0)
    sink.update(progress())
    assert not path.exists(), "nothing is new"
    sink.update(progress(step=151))
    assert json.loads(path.read_text())["step"] == 151
    clock.advance(5.0)
    sink.update(progress(step=152))
    assert json.loads(path.read_text())["step"] == 151, "not yet"


@pytest.mark.parametrize(
    "news",
    [
        {"state": "evaluating"},
        {"state": "stopped"},
        {"checkpoints": Checkpoints(latest="/c/checkpoint-151", created=4)},
        {"step": 100},
    ],
)
def test_some_news_is_written_at_once(path: Path, clock: FakeClock, news: dict[str, Any]) -> None:
    sink = FileSink(path, every_steps=1000, clock=clock)
    sink.update(progress())
    sink.update(progress(**news))
    assert json.loads(path.read_text()) == progress_json.for_file(progress(**news))


def test_the_last_word_is_always_written(path: Path, clock: FakeClock) -> None:
    sink = FileSink(path, every_steps=1000, clock=clock)
    sink.update(progress())
    sink.close(progress(step=151))
    assert json.loads(path.read_text())["step"] == 151
