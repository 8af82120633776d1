"""What the launcher knows of the next start, from the folder alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprieve.launch.runs.next_start import find_next_start


def test_a_folder_without_checkpoints_is_known_to_start_over(tmp_path: Path) -> None:
    found = find_next_start(str(tmp_path))
    assert found is not None and found.checkpoint is None


@pytest.mark.parametrize("name", ["checkpoint_2026-11-18_10-12-01.123456", "reprieve"])
def test_in_rays_folder_of_a_run_it_is_not_known(tmp_path: Path, name: str) -> None:
    """Which of its checkpoints is the last, or whether there is one of ours, is for Ray's driver to find out."""
    (tmp_path / name).mkdir()
    assert find_next_start(str(tmp_path)) is None
