"""How much memory is left, under cgroup v1 and v2, from trees of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprieve.checkpoint.buffers.available_memory import available_bytes

GIB = 2**30


def tree(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(most: str, used: int, inactive: int = 0, at: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup{at}"
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_anon 7\ninactive_file {inactive}\nactive_file 9\n",
    }


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path)) == 32 * GIB
    assert available_bytes(tree(tmp_path, **v2("max", 20 * GIB))) == 32 * GIB


def test_v2_limit_less_usage_plus_cache_that_can_go(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, **v2(str(8 * GIB), 6 * GIB, GIB))) == 3 * GIB


def test_v1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{7 * GIB}\n",
        f"{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_bytes(tree(tmp_path, **files)) == GIB + GIB // 2
    files[f"{folder}/memory.limit_in_bytes"] = "9223372036854771712\n"  # v1's way to say: none
    assert available_bytes(tree(tmp_path, **files)) == 32 * GIB


def test_a_limit_above_the_machine_does_not_count(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, **v2(str(500 * GIB), 0))) == 32 * GIB


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, **v2(str(GIB), 2 * GIB))) == 0


def test_a_machine_that_tells_nothing_has_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0


def test_this_machine() -> None:
    assert 0 < available_bytes() < 2**50


@pytest.mark.parametrize("limited", ["/system.slice/job_7", "/system.slice/job_7/step_0"])
def test_v2_limit_of_our_own_group_or_one_above_it(tmp_path: Path, limited: str) -> None:
    files = {"proc/self/cgroup": "0::/system.slice/job_7/step_0\n", **v2("max", 0, at="/system.slice/job_7/step_0")}
    root = tree(tmp_path, **{**files, **v2(str(4 * GIB), 3 * GIB, at=limited)})
    assert available_bytes(root) == GIB
