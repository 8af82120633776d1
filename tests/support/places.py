"""Folders of the repository that tests use."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
JOBS = SUPPORT / "jobs"
"""Scripts that child processes run."""
HF_SCRIPTS = SUPPORT / "hf_scripts"
SITE = SUPPORT / "site"
"""On PYTHONPATH: its `sitecustomize` makes processes start and end sooner."""
HIDE_DEEPSPEED = {"TESTS_HIDE": "deepspeed"}
"""In the environment: where it is installed, Accelerate otherwise imports DeepSpeed in each process."""
HIDE_OPTIONAL = {"TESTS_HIDE": "datasets deepspeed pandas peft scipy sklearn"}
"""In the environment: `import transformers` finds none of the packages that it uses only if they are installed."""
FIXTURES = SUPPORT.parent / "fixtures"
"""Files that tests read; a test copies what it changes."""
ROOT = SUPPORT.parents[1]
"""The repository."""
