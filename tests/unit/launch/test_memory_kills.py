"""The kernel's count of processes that it killed for memory, from folders with files like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprieve.launch.memory_kills import count_memory_kills

V2 = "low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("own", "events", "text"),
    [
        ("0::/\n", "memory.events", V2),
        ("0::/user.slice\n", "user.slice/memory.events", V2),
        ("4:memory:/\n", "memory/memory.oom_control", V1),
        ("4:memory:/jobs\n", "memory/jobs/memory.oom_control", V1),
        # A container without a cgroup namespace: its path is the host's, and its own group is mounted at the top.
        ("4:memory:/kubepods/pod1/main\n0::/\n", "memory/memory.oom_control", V1),
    ],
    ids=["v2 in a container", "v2", "v1 in a container", "v1", "v1 with the path of the host"],
)
def test_it_is_found(own: str, events: str, text: str, tmp_path: Path) -> None:
    for name, content in {"proc/self/cgroup": own, f"sys/fs/cgroup/{events}": text}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert count_memory_kills(tmp_path) == 3


def test_a_machine_without_cgroups_has_none(tmp_path: Path) -> None:
    assert count_memory_kills(tmp_path) is None
