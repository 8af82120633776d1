"""Folders that tests start things from."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
JOBS = SUPPORT / "jobs"
"""What child processes run."""
HF_SCRIPTS = SUPPORT / "hf_scripts"
FIXTURES = SUPPORT.parent / "fixtures"
"""Files that tests read; a test copies what it changes."""
ROOT = SUPPORT.parents[1]
"""The repository."""
