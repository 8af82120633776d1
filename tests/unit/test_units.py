"""Parsing of durations, sizes and folders as people write them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from reprieve.errors import ConfigError
from reprieve.storage.uri import local_path
from reprieve.units import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("250ms", 0.25), ("1.5h", 5400), ("1 h 30 m", 5400),
        (7, 7), (0.5, 0.5), (timedelta(minutes=1), 60),
    ],
)  # fmt: skip
def test_durations(text: str | float | timedelta, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "5 minutes", "1h30", "-5m", "5m!", "0s", 0, -1, timedelta(0)])
def test_an_invalid_duration_is_named_in_the_error(text: str | float | timedelta) -> None:
    with pytest.raises(ConfigError, match="duration") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("50GB", 50 * 10**9), ("256MiB", 256 * 2**20), ("1.5 kB", 1500), ("7", 7), ("7b", 7), ("2tib", 2 * 2**40), (9, 9)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5 XB", "-5GB", "5 GB more"])
def test_an_invalid_size_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_490_000_000, "1.49 GB"), (5e15, "5e+03 TB")],
)
def test_formatted_sizes(count: float, text: str) -> None:
    assert format_size(count) == text


def test_paths_and_file_uris(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert local_path("runs/a") == tmp_path / "runs/a"
    assert local_path("~/runs") == Path("/home/someone/runs")
    assert local_path("file:///a%20b/c") == Path("/a b/c")
    for bad in ("", "s3://bucket/x", "file://host/x"):
        with pytest.raises(ConfigError):
            local_path(bad)
