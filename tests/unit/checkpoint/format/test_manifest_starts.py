"""Where the blocks of a file start: what a manifest may contain, and what it refuses before using it."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.format.checksum import digest_of, file_digest
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import PAGE
from tests.support.helpers import manifest

DIGEST = "0123456789abcdef" * 2


def encoded(entry: dict[str, Any], **changes: Any) -> bytes:
    """Return a manifest that another program might write, with a correct checksum of its own."""
    body = json.loads(manifest().encode())["manifest"]
    body |= {"files": {"file": entry}, **changes}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"manifest": body, "xxh3_128": digest_of(canonical)}, sort_keys=True, indent=1).encode() + b"\n"


def entry(size: Any, starts: Any, blocks: int | None = None) -> dict[str, Any]:
    digests = [DIGEST] * (len(starts) if blocks is None else blocks)
    return {"bytes": size, "blocks": digests, "starts": starts, "xxh3_128": file_digest(digests)}


@st.composite
def good_starts(draw: st.DrawFn) -> tuple[int, list[int]]:
    starts, at = [0], 0
    for pages in draw(st.lists(st.integers(1, BLOCK_BYTES // PAGE), max_size=20)):
        at += pages * PAGE
        starts.append(at)
    return at + draw(st.integers(1, BLOCK_BYTES)), starts


@given(good_starts())
def test_blocks_of_any_number_of_pages(case: tuple[int, list[int]]) -> None:
    size, starts = case
    data = encoded(entry(size, starts))
    decoded = Manifest.decode(data)
    assert decoded.files["file"].edges(BLOCK_BYTES) == [*starts, size]
    assert decoded.encode() == data


def test_an_empty_file_has_no_blocks() -> None:
    assert Manifest.decode(encoded(entry(0, []))).files["file"].edges(BLOCK_BYTES) == [0]
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(encoded(entry(0, [0])))


BAD: dict[str, dict[str, Any]] = {
    "negative": entry(3 * PAGE, [0, -PAGE, PAGE]),
    "starts below zero": entry(3 * PAGE, [-PAGE, 0, PAGE]),
    "unsorted": entry(3 * PAGE, [0, 2 * PAGE, PAGE]),
    "twice the same": entry(3 * PAGE, [0, PAGE, PAGE]),
    "not a page": entry(3 * PAGE, [0, PAGE + 1]),
    "not from the start": entry(3 * PAGE, [PAGE, 2 * PAGE]),
    "none for a file that has bytes": entry(3 * PAGE, []),
    "some for a file that has none": entry(0, [0]),
    "at the end": entry(3 * PAGE, [0, 3 * PAGE]),
    "behind the end": entry(3 * PAGE, [0, 4 * PAGE]),
    "a block too large": entry(BLOCK_BYTES + 2 * PAGE, [0, BLOCK_BYTES + PAGE]),
    "a last block too large": entry(10**15, [0, PAGE]),
    "huge": entry(10**30, [0, 10**29 // PAGE * PAGE]),
    "fewer than checksums": entry(3 * PAGE, [0, PAGE], blocks=3),
    "more than checksums": entry(3 * PAGE, [0, PAGE, 2 * PAGE], blocks=2),
    "many more than checksums": entry(10**12, [0, PAGE], blocks=0),
    "null": entry(3 * PAGE, None, blocks=1),
    "true": entry(3 * PAGE, [0, True], blocks=2),
    "false for zero": entry(PAGE, [False], blocks=1),
    "floats": entry(3 * PAGE, [0, float(PAGE)], blocks=2),
    "text": entry(3 * PAGE, ["0"], blocks=1),
    "a text": entry(3 * PAGE, "0", blocks=1),
    "an object": entry(3 * PAGE, {"0": 0}, blocks=1),
    "a number": entry(3 * PAGE, 0, blocks=1),
    "nested": entry(3 * PAGE, [[0]], blocks=1),
    "a size that is no number": entry("1", [0], blocks=1),
    "a negative size": entry(-1, [0], blocks=1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_starts_are_refused(name: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(encoded(BAD[name]))


@pytest.mark.parametrize("size", [10**12, 2**62, 10**100])
def test_a_hostile_size_takes_no_memory(size: int) -> None:
    """Neither the list of its blocks nor anything else of that size is built."""
    for file_entry in (
        {"bytes": size, "blocks": [], "xxh3_128": file_digest([])},
        entry(size, [0]),
        entry(size, [0, PAGE]),
    ):
        data = encoded(file_entry)
        tracemalloc.start()
        started = time.process_time()
        with pytest.raises(InvalidCheckpoint):
            Manifest.decode(data)
        assert time.process_time() - started < 0.5
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


DEEP = b"[" * 100_000

NOT_A_MANIFEST = {
    "deep": DEEP,
    "deep objects": b'{"manifest":' * 100_000,
    "deep and closed": b'{"manifest": ' + DEEP + DEEP.replace(b"[", b"]") + b', "xxh3_128": ""}',
    "many digits": b'{"manifest": ' + b"9" * 100_000 + b', "xxh3_128": ""}',
    "no text": b"\xff\xfe",
    "null": b"null",
    "empty": b"",
    "a list": b"[]",
}


@pytest.mark.parametrize("name", NOT_A_MANIFEST)
def test_what_is_not_a_manifest_is_refused(name: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(NOT_A_MANIFEST[name])


@pytest.mark.parametrize("depth", [2, 300, 900])
@pytest.mark.parametrize("member", ["versions", "metrics", "state", "files", "parent", "epoch"])
def test_nested_values_are_refused(member: str, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    value = {"a": nested} if member in ("versions", "metrics", "files") else nested
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(encoded(entry(1, [0]), **{member: value}))


def test_default_starts_are_not_written() -> None:
    """There is one encoding: a file in blocks of the default size has no `starts`."""
    plain = FileEntry.of(3, [DIGEST])
    assert b"starts" not in manifest(files={"file": plain}).encode()
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(encoded(entry(3, None, blocks=1)))
    assert b"starts" in manifest(files={"file": FileEntry.of(3, [DIGEST], [0])}).encode()


def test_a_hundred_thousand_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    count = 100_000
    files = {"file": FileEntry.of(count * PAGE, [DIGEST] * count, list(range(0, count * PAGE, PAGE)))}
    started = time.process_time()
    assert Manifest.decode(manifest(files=files).encode()).size == count * PAGE
    assert time.process_time() - started < 5
