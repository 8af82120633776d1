"""Intercepts what Hugging Face saves: its files become file layouts that refer to live tensors.

Hugging Face decides what to save and under which names; the engine decides how the bytes reach the disk. While a
trainer's own code saves into a scratch folder, `torch.save` and safetensors are intercepted and do not write.
Afterwards the other files in the folder (configurations, tokenizers, the trainer's state) are read back. Each rank has
its own scratch folder and skips barriers, where it could wait for a failed rank: the engine agrees on the outcome.
Other threads and other folders are not affected.
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

_LARGE_BYTES = 2**20
"""Files with at least so many bytes of tensors are streamed. Smaller ones are serialized by torch."""

_SAFETENSORS = {
    "safetensors.torch": "save_file",
    "transformers.modeling_utils": "safe_save_file",
    "accelerate.utils.other": "safe_save_file",
    "peft.peft_model": "safe_save_file",
    "peft.utils.save_and_load": "safe_save_file",
}
"""Where libraries hold `save_file`: module → name."""

_ALIASED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of weights in training. DLPack round-trips all of these; an int4 comes back as an int8."""

_thread = threading.local()
"""`interceptor`: the one that is active in this thread."""


class SaveInterceptor:
    """A context in which this thread's saves below `folder` are intercepted. `files()` returns them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layouts: dict[str, FileLayout] = {}

    def __enter__(self) -> SaveInterceptor:
        assert _active_interceptor() is None, "one save at a time"
        _thread.interceptor = self
        _patches.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        _patches.release()
        _thread.interceptor = None

    def files(self) -> list[FileLayout]:
        """Return the intercepted files in the order of their saves, then those that were written to the folder."""
        found = list(self._layouts.values())
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in self._layouts:
                found.append(_layout_of_file(name, path))
        return found

    def name_of(self, path: object) -> str | None:
        """Return the path relative to the checkpoint, or None if it is outside."""
        if not isinstance(path, str | os.PathLike):
            return None
        absolute = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 - resolve() would follow links
        return absolute.relative_to(self._folder).as_posix() if absolute.is_relative_to(self._folder) else None

    def add_layout(self, layout: FileLayout) -> None:
        self._layouts[layout.name] = layout

    def discard(self, path: object) -> None:
        """Leave out a file that was intercepted."""
        if (name := self.name_of(path)) is not None:
            self._layouts.pop(name, None)


def _active_interceptor() -> SaveInterceptor | None:
    return getattr(_thread, "interceptor", None)


def _save(original: Callable[..., None], obj: object, f: object, *args: Any, **kwargs: Any) -> None:
    """Replaces `torch.save`."""
    interceptor = _active_interceptor()
    name = interceptor.name_of(f) if interceptor is not None else None
    if interceptor is None or name is None or args or kwargs.keys() - {"_use_new_zipfile_serialization"}:
        original(obj, f, *args, **kwargs)
    elif sum(tensor.nbytes for _, tensor in tensors_in(obj)) < _LARGE_BYTES:
        # Not into the folder: torch reports a full disk as an unspecific failure. And never in torch's old format,
        # which cannot be checked without running it.
        memory = io.BytesIO()
        original(obj, memory)
        interceptor.add_layout(bytes_layout(name, memory.getvalue()))
    else:
        interceptor.add_layout(layout_torch(name, obj))


def _save_file(
    original: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    filename: object,
    metadata: Any = None,
    **kwargs: Any,
) -> None:
    """Replaces `safetensors.torch.save_file`."""
    interceptor = _active_interceptor()
    name = interceptor.name_of(filename) if interceptor is not None else None
    if interceptor is None or name is None or kwargs or not all(can_hold(tensor) for tensor in tensors.values()):
        original(tensors, filename, metadata, **kwargs)
    else:
        interceptor.add_layout(layout_one(name, tensors, metadata))


def _barrier(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `torch.distributed.barrier`."""
    return original(*args, **kwargs) if _active_interceptor() is None else None


def _file_system_writer(original: Callable[..., Any], path: object, *args: Any, **kwargs: Any) -> Any:
    """Replaces DCP's `FileSystemWriter`."""
    interceptor = _active_interceptor()
    name = interceptor.name_of(path) if interceptor is not None else None
    if interceptor is None or name is None:
        return original(path, *args, **kwargs)
    from reprieve.adapters.transformers.save.dcp_interception import InterceptingWriter

    return InterceptingWriter(name, interceptor.add_layout)


def _remove_dummy_checkpoint(
    original: Callable[..., None], is_main_process: bool, output_dir: str, filenames: list[str]
) -> None:
    """Replaces transformers' function: with ZeRO 3 it saves a model without weights, for the files beside them."""
    if (interceptor := _active_interceptor()) is not None:
        for filename in filenames:
            interceptor.discard(Path(output_dir) / filename)
    original(is_main_process, output_dir, filenames)


def _clone_tensors(original: Callable[..., Any], item: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces DeepSpeed's `clone_tensors_for_torch_save`.

    DeepSpeed's weights are views of one large tensor, which torch.save would write whole for each of them. A copy in
    main memory took 3 s of a stop for 3 GB on an H200. DLPack gives an alias with a storage of its own instead.
    """
    if _active_interceptor() is None or not isinstance(item, dict):
        return original(item, *args, **kwargs)
    return {
        name: from_dlpack(value)
        if type(value) is torch.Tensor and value.dtype in _ALIASED_DTYPES and value.is_contiguous()
        else original(value, *args, **kwargs)
        for name, value in item.items()
    }


def _layout_of_file(name: str, path: Path) -> FileLayout:
    """Lay out a file as it was written."""
    if path.stat().st_size < _LARGE_BYTES:
        return bytes_layout(name, path.read_bytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    builder = LayoutBuilder(name)
    builder.add_bytes(mapped)  # type: ignore[arg-type]
    return builder.build()


class _Patches:
    """The functions of other libraries that are replaced while any thread has an active interceptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def acquire(self) -> None:
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

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._originals:
                    setattr(*self._originals.pop())

    def _replace(self, module: Any, name: str, replacement: Callable[..., None]) -> None:
        """Replace the function if the module was imported and has it."""
        original = getattr(module, name, None)
        if original is None:
            return
        self._originals.append((module, name, original))
        setattr(module, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))


_patches = _Patches()
