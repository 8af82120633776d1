"""Copies off a GPU that run beside training: one stream per device, ordered after what training has queued so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from reprieve.checkpoint.format.layout import FileLayout


class CopyStreams:
    """While entered, copies from the layouts' devices go to streams of their own. Falsy where there is no device."""

    def __init__(self, layouts: Iterable[FileLayout]) -> None:
        devices = set[torch.device]().union(*(layout.devices for layout in layouts))
        self._streams = [torch.cuda.Stream(device) for device in sorted(devices, key=str) if device.type == "cuda"]
        self._stack = contextlib.ExitStack()

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __enter__(self) -> CopyStreams:
        for stream in self._streams:
            # The optimizer's last kernels may still be queued: the copy must see their result.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            self._stack.enter_context(torch.cuda.stream(stream))
        return self

    def wait(self) -> None:
        """Until all copies so far have arrived in host memory."""
        for stream in self._streams:
            stream.synchronize()

    def __exit__(self, *exc: object) -> None:
        self.wait()
        self._stack.close()
