"""Folders of the repository that tests use."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
JOBS = SUPPORT / "jobs"
"""Scripts that child processes run."""
HF_SCRIPTS = SUPPORT / "hf_scripts"
SITE = SUPPORT / "site"
"""On PYTHONPATH: its `sitecustomize` makes processes start and end sooner."""
HIDE_DEEPSPEED = {"TESTS_HIDE": "cuda deepspeed triton"}
"""In the environment: where it is installed, Accelerate otherwise imports DeepSpeed in each process."""
HIDE_OPTIONAL = {"TESTS_HIDE": "cuda datasets deepspeed pandas peft scipy sklearn triton"}
"""In the environment: torch and transformers find none of the packages that they use only if they are installed."""
FIXTURES = SUPPORT.parent / "fixtures"
"""Files that tests read; a test copies what it changes."""
ROOT = SUPPORT.parents[1]
"""The repository."""
