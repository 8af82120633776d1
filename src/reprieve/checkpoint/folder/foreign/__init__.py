"""Checkpoints that other tools wrote: valid only after every file was opened and read, and nothing in it was run."""

from reprieve.checkpoint.folder.foreign.checker import check_foreign
from reprieve.checkpoint.folder.foreign.torch_zip import unsafe_globals

__all__ = ["check_foreign", "unsafe_globals"]
