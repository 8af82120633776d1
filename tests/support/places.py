"""Folders of the repository that tests use."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
JOBS = SUPPORT / "jobs"
"""Scripts that child processes run."""
HF_SCRIPTS = SUPPORT / "hf_scripts"
WITHOUT_DEEPSPEED = str(SUPPORT / "without_deepspeed")
"""On PYTHONPATH, it hides DeepSpeed, which Accelerate otherwise imports in each process."""
FIXTURES = SUPPORT.parent / "fixtures"
"""Files that tests read; a test copies what it changes."""
ROOT = SUPPORT.parents[1]
"""The repository."""
