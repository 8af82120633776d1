"""What Hugging Face saves, caught on its way to the disk: its files become layouts, with live tensors in them.

Hugging Face decides what is saved and under which names; the engine decides how it gets to the disk. While a trainer's
own code saves into a scratch folder, large `torch.save`s and safetensors are noted and not written. What else is there
afterwards (configurations, tokenizers, the trainer's state) is read back. Each rank has a folder of its own, so nobody
waits at a barrier for a rank that may have failed: the engine agrees on the outcome. Other threads and other folders
go on as ever.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from reprieve.checkpoint.format.layout import FileLayout, LayoutBuilder, bytes_layout
from reprieve.checkpoint.format.safetensors_layout import can_hold, layout_one
from reprieve.checkpoint.format.torch_layout import layout_torch, tensors_in

_LARGE = 2**20
"""Bytes of tensors from which on a file is worth streaming. Smaller ones are as torch writes them."""

_SAFETENSORS = {
    "safetensors.torch": "save_file",
    "transformers.modeling_utils": "safe_save_file",
    "accelerate.utils.other": "safe_save_file",
    "peft.peft_model": "safe_save_file",
    "peft.utils.save_and_load": "safe_save_file",
}
"""Modules that hold the function under a name of their own."""

_ALIASED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights in training are made of. DLPack passes all of these on as they are; an int4 comes back as an int8."""

_collecting = threading.local()


class SaveInterceptor:
    """From `with` to its end, in this thread: `files()` is what was saved below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._caught: dict[str, FileLayout] = {}

    def __enter__(self) -> SaveInterceptor:
        assert getattr(_collecting, "now", None) is None, "one save at a time"
        _collecting.now = self
        _patches.enter()
        return self

    def __exit__(self, *exc: object) -> None:
        _patches.leave()
        _collecting.now = None

    def files(self) -> list[FileLayout]:
        """Large ones first, as they were given; then what is in the folder."""
        found = list(self._caught.values())
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in self._caught:
                found.append(_as_it_is(name, path))
        return found

    def name_of(self, path: object) -> str | None:
        """As the checkpoint calls it; None: it does not belong to it."""
        if not isinstance(path, str | os.PathLike):
            return None
        whole = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 - resolve() would follow links
        return whole.relative_to(self._folder).as_posix() if whole.is_relative_to(self._folder) else None

    def take(self, layout: FileLayout) -> None:
        self._caught[layout.name] = layout

    def drop(self, path: object) -> None:
        """It is not to be saved, after all."""
        if (name := self.name_of(path)) is not None:
            self._caught.pop(name, None)


def _save(real: Callable[..., None], obj: object, f: object, *args: Any, **kwargs: Any) -> None:
    """In place of `torch.save`."""
    here: SaveInterceptor | None = getattr(_collecting, "now", None)
    name = here.name_of(f) if here is not None else None
    if here is None or name is None or args or kwargs.keys() - {"_use_new_zipfile_serialization"}:
        real(obj, f, *args, **kwargs)
    elif _bytes_in(obj) < _LARGE:
        # Not into the folder: torch says of a full disk no more than that something failed. And never in torch's old
        # format, which nobody can check without running it.
        memory = io.BytesIO()
        real(obj, memory)
        here.take(bytes_layout(name, memory.getvalue()))
    else:
        here.take(layout_torch(name, obj))


def _save_file(
    real: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    filename: object,
    metadata: Any = None,
    **kwargs: Any,
) -> None:
    """In place of `safetensors.torch.save_file`."""
    here: SaveInterceptor | None = getattr(_collecting, "now", None)
    name = here.name_of(filename) if here is not None else None
    if here is None or name is None or kwargs or not all(can_hold(tensor) for tensor in tensors.values()):
        real(tensors, filename, metadata, **kwargs)
    else:
        here.take(layout_one(name, tensors, metadata))


def _barrier(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of `torch.distributed.barrier`."""
    return real(*args, **kwargs) if getattr(_collecting, "now", None) is None else None


def _file_system_writer(real: Callable[..., Any], path: object, *args: Any, **kwargs: Any) -> Any:
    """In place of DCP's `FileSystemWriter`."""
    here: SaveInterceptor | None = getattr(_collecting, "now", None)
    name = here.name_of(path) if here is not None else None
    if here is None or name is None:
        return real(path, *args, **kwargs)
    from reprieve.adapters.transformers.save.dcp_interception import InterceptingWriter

    return InterceptingWriter(name, here.take)


def _remove_dummy_checkpoint(
    real: Callable[..., None], is_main_process: bool, output_dir: str, filenames: list[str]
) -> None:
    """In place of transformers': with ZeRO 3, a model without weights is saved for all that is beside them."""
    here: SaveInterceptor | None = getattr(_collecting, "now", None)
    if here is not None:
        for filename in filenames:
            here.drop(Path(output_dir) / filename)
    real(is_main_process, output_dir, filenames)


def _clone_tensors(real: Callable[..., Any], item: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of DeepSpeed's `clone_tensors_for_torch_save`. Its weights are parts of one large tensor, which nobody
    could save one by one; a copy in main memory took 3 s of a stop for 3 GB on an H200. What we take from here is read
    where it is."""
    if getattr(_collecting, "now", None) is None or not isinstance(item, dict):
        return real(item, *args, **kwargs)
    return {
        name: from_dlpack(value)
        if type(value) is torch.Tensor and value.dtype in _ALIASED and value.is_contiguous()
        else real(value, *args, **kwargs)
        for name, value in item.items()
    }


def _bytes_in(obj: object) -> int:
    return sum(tensor.nbytes for _, tensor in tensors_in(obj))


def _as_it_is(name: str, path: Path) -> FileLayout:
    if path.stat().st_size < _LARGE:
        return bytes_layout(name, path.read_bytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    builder = LayoutBuilder(name)
    builder.add_bytes(mapped)  # type: ignore[arg-type]
    return builder.build()


class _Patches:
    """The functions that are replaced while anybody collects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._real: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._replace(torch, "save", _save)
            self._replace(torch.distributed, "barrier", _barrier)
            self._replace(sys.modules.get("torch.distributed.checkpoint"), "FileSystemWriter", _file_system_writer)
            for module, name in _SAFETENSORS.items():
                self._replace(sys.modules.get(module), name, _save_file)
            self._replace(sys.modules.get("transformers.trainer"), "remove_dummy_checkpoint", _remove_dummy_checkpoint)
            self._replace(sys.modules.get("deepspeed.checkpoint.utils"), "clone_tensors_for_torch_save", _clone_tensors)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._real:
                    setattr(*self._real.pop())

    def _replace(self, module: Any, name: str, ours: Callable[..., None]) -> None:
        """If the module was imported, and has it."""
        real = getattr(module, name, None)
        if real is None:
            return
        self._real.append((module, name, real))
        setattr(module, name, lambda *args, **kwargs: ours(real, *args, **kwargs))


_patches = _Patches()
