"""`reprieve.dcp` under `dcp.save`, `dcp.async_save` and `dcp.load`, with real ranks."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify
from reprieve.testing import FullDisk, run_ranks, values
from tests.support.jobs import dcp_jobs as ranks

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))

pytestmark = [pytest.mark.fsdp, pytest.mark.xdist_group("dcp")]  # the fixtures take longer than the tests

BOTH_WAYS = {"ours by stock": True, "stock by ours": True, "ours by ours": True}


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def on_3(top: Path) -> list[dict[str, Any]]:
    return values(
        run_ranks(
            3, ranks.together,
            {"fsdp": (ranks.write_and_read_both_ways, top / "3", "fsdp"), "write": (ranks.write, top / "fsdp", "fsdp")},
            timeout="280s",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_4(top: Path, on_3: object) -> list[dict[str, Any]]:
    return values(
        run_ranks(
            4, ranks.together,
            {
                "hsdp": (ranks.write_and_read_both_ways, top / "hsdp-4", "hsdp"),
                "2d": (ranks.write_and_read_both_ways, top / "2d-4", "2d"),
                "write": (ranks.write, top / "2d", "2d"),
                "read as hsdp": (ranks.read, top, ["fsdp", "2d"], "hsdp"),
                "read as 2d": (ranks.read, top, ["fsdp", "2d"], "2d"),
            },
            timeout="280s",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_2(top: Path, on_4: object) -> list[dict[str, Any]]:
    fails = {
        f"fails {rank} {code}": (
            ranks.fail_then_load, top / f"fails-{rank}-{code}" / "last", rank,
            ranks.BreaksAtWrite, 2, getattr(errno, code),
        )
        for rank in (0, 1)
        for code in ("EIO", "ENOSPC")
    }  # fmt: skip
    return values(
        run_ranks(
            2, ranks.together,
            {
                "read as fsdp": (ranks.read, top, ["fsdp", "2d"], "fsdp"),
                **fails,
                "full": (ranks.fail_then_load, top / "full" / "last", 1, FullDisk, 1000),
                "damage": (ranks.damage_then_load, top / "damaged"),
                "thread": (ranks.save_asynchronously, top / "thread", "thread"),
                "process": (ranks.save_asynchronously, top / "process", "process"),
            },
            timeout="280s",
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "2d"])
def test_ours_and_stock_read_each_other(
    kind: str, top: Path, on_3: list[dict[str, Any]], on_4: list[dict[str, Any]]
) -> None:
    for found in on_3 if kind == "fsdp" else on_4:
        assert found[kind] == BOTH_WAYS
    assert verify(top / ("3" if kind == "fsdp" else f"{kind}-4") / "ours", BlockPool()).manifest is not None


def test_saved_on_some_ranks_loaded_on_others(
    on_2: list[dict[str, Any]], on_3: list[dict[str, Any]], on_4: list[dict[str, Any]]
) -> None:
    saved = {"fsdp": on_3[0]["write"], "2d": on_4[0]["write"]}
    for how, results in {"read as fsdp": on_2, "read as hsdp": on_4, "read as 2d": on_4}.items():
        for result in results:
            assert isinstance(result[how], dict), result[how]
            assert [name for name in saved if result[how][name] != saved[name]] == [], how


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_a_rank_that_fails_fails_the_save_on_all(failing: int, code: str, on_2: list[dict[str, Any]]) -> None:
    for found in (result[f"fails {failing} {code}"] for result in on_2):
        assert f"(RANK {failing})" in found["message"]
        assert ("StorageFull: not enough space" if code == "ENOSPC" else "StorageError: ") in found["message"]
        assert found["names"] == ["last"], "nothing of the new one is left"
        assert found["loaded"] == 1


def test_a_full_disk_is_noticed_before_the_first_byte(on_2: list[dict[str, Any]]) -> None:
    for found in (result["full"] for result in on_2):
        assert "(RANK 1)" in found["message"] and "StorageFull" in found["message"]
        assert "50.3 MB needed" in found["message"] and "free" in found["message"]
        assert (found["names"], found["loaded"]) == (["last"], 1)


def test_a_damaged_block_of_one_rank_is_raised_on_all(on_2: list[dict[str, Any]]) -> None:
    for found in (result["damage"] for result in on_2):
        assert "(RANK 1)" in found["block"] and "(RANK 0)" not in found["block"], "rank 0 needs nothing of it"
        assert "InvalidCheckpoint" in found["block"]
        assert "__1_0.distcp is damaged: block 2 (bytes 33,554,432 to 50,331,648)" in found["block"]
        assert "InvalidCheckpoint" in found["metadata"] and ".metadata has 0 bytes" in found["metadata"]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_asynchronous_saves(kind: str, top: Path, on_2: list[dict[str, Any]]) -> None:
    assert [result[kind] for result in on_2] == [{"ours": 3, "stock": 3}] * 2
    assert verify(top / kind, BlockPool()).manifest is not None


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dying", "at", "nth"), [(1, "write", 2), (0, "rename", 1), *([(0, "write", 2)] if SOAK else [])]
)
def test_a_rank_that_dies_leaves_the_old_one(dying: int, at: str, nth: int, tmp_path: Path) -> None:
    path = tmp_path / "last"
    results = run_ranks(2, ranks.save_and_die, path, dying, at, nth, group_timeout="10s", timeout="120s")
    assert results[dying].signal == signal.SIGKILL
    assert results[1 - dying].value not in ("saved", None), "the other rank got an error"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".last.saving", "last"]
    after = {
        "load": (ranks.load_numbered, path),
        "other": (ranks.save_again, tmp_path / "other", 2),
        "again": (ranks.save_again, path, 3),
    }
    for found in values(run_ranks(2, ranks.together, after, timeout="120s")):
        assert found["load"] == 1
        # The next save removes an incomplete leftover, whatever its name; a complete one, only a save of its own name.
        assert found["other"] == ([".last.saving", "last", "other"] if at == "rename" else ["last", "other"], 2)
        assert found["again"] == (["last", "other"], 3)
