"""Log lines of Reprieve where the script has set up no logging: with a prefix, once for all ranks."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from reprieve.console import ONE_RANK, fallback, show_logs

log = logging.getLogger("reprieve")


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called in a test: logging as in a script that has not set it up. pytest adds handlers to each phase."""

    def remove_handlers() -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(log, "handlers", [])
        monkeypatch.setattr(fallback, "rank", 0)

    return remove_handlers


def test_a_line_has_a_prefix_and_comes_once(
    unconfigured: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    unconfigured()
    show_logs(0)
    show_logs(0)
    log.info("not shown")
    log.warning("saved step %d", 30)
    assert capsys.readouterr().err == "reprieve: saved step 30\n"


def test_another_rank_shows_errors_and_what_concerns_it_alone(
    unconfigured: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    unconfigured()
    show_logs(1)
    log.warning("saved step 30")
    log.warning("this machine will be taken away", extra=ONE_RANK)
    log.error("step 31 is not saved")
    assert capsys.readouterr().err == (
        "reprieve: rank 1: this machine will be taken away\nreprieve: rank 1: step 31 is not saved\n"
    )


def test_before_the_rank_is_known_the_environment_names_it(
    unconfigured: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfigured()
    monkeypatch.setenv("RANK", "3")
    show_logs()
    assert fallback.rank == 3


@pytest.mark.parametrize("name", ["", "reprieve"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_handler_of_the_script_gets_every_record_and_nothing_else_is_printed(
    unconfigured: Callable[[], None], capsys: pytest.CaptureFixture[str], name: str, rank: int
) -> None:
    """Also one that is added after the session has begun."""
    unconfigured()
    show_logs(rank)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    log.warning("one")
    log.error("two")
    assert [record.getMessage() for record in records] == ["one", "two"]
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_disturbs_nobody(unconfigured: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    unconfigured()
    show_logs(0)
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("nobody reads this")


def test_nothing_is_installed_at_import() -> None:
    code = (
        "import logging, reprieve; reprieve.Run; log = logging.getLogger('reprieve'); "
        "assert not log.handlers and not log.filters and log.level == 0 and not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
