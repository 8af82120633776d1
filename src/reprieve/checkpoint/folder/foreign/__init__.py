"""Checks checkpoints of other tools: valid once every file was opened and read. Nothing in them is run."""

from reprieve.checkpoint.folder.foreign.checker import check_foreign
from reprieve.checkpoint.folder.foreign.torch_zip import unsafe_globals

__all__ = ["check_foreign", "unsafe_globals"]
