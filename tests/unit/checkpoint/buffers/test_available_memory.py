"""Available memory under cgroup v1 and v2, read from folders with files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprieve.checkpoint.buffers.available_memory import available_bytes

GIB = 2**30


def fake_root(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(limit: str, used: int, inactive: int = 0, at: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup{at}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_anon 7\ninactive_file {inactive}\nactive_file 9\n",
    }


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(fake_root(tmp_path)) == 32 * GIB
    assert available_bytes(fake_root(tmp_path, **v2("max", 20 * GIB))) == 32 * GIB


def test_v2_limit_minus_usage_plus_inactive_cache(tmp_path: Path) -> None:
    assert available_bytes(fake_root(tmp_path, **v2(str(8 * GIB), 6 * GIB, GIB))) == 3 * GIB


def test_v1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{7 * GIB}\n",
        f"{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_bytes(fake_root(tmp_path, **files)) == GIB + GIB // 2
    files[f"{folder}/memory.limit_in_bytes"] = "9223372036854771712\n"  # in v1, this means no limit
    assert available_bytes(fake_root(tmp_path, **files)) == 32 * GIB


def test_a_limit_above_the_machines_memory_is_ignored(tmp_path: Path) -> None:
    assert available_bytes(fake_root(tmp_path, **v2(str(500 * GIB), 0))) == 32 * GIB


def test_nothing_is_available_if_usage_exceeds_the_limit(tmp_path: Path) -> None:
    assert available_bytes(fake_root(tmp_path, **v2(str(GIB), 2 * GIB))) == 0


def test_nothing_is_available_if_no_file_can_be_read(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0


def test_the_machine_that_runs_the_tests() -> None:
    assert 0 < available_bytes() < 2**50


@pytest.mark.parametrize("limited", ["/system.slice/job_7", "/system.slice/job_7/step_0"])
def test_v2_limit_of_the_own_group_or_a_parent(tmp_path: Path, limited: str) -> None:
    files = {"proc/self/cgroup": "0::/system.slice/job_7/step_0\n", **v2("max", 0, at="/system.slice/job_7/step_0")}
    root = fake_root(tmp_path, **{**files, **v2(str(4 * GIB), 3 * GIB, at=limited)})
    assert available_bytes(root) == GIB
