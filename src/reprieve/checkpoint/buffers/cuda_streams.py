"""CUDA streams for copies off a GPU that run beside training.

There is one stream per device. Its copies run after the kernels that training has queued so far, so they see the result
of the last optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch


class CopyStreams:
    """A context in which copies from the GPUs among `devices` use streams of their own. False if there is no GPU."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        gpus = {device for device in devices if device.type == "cuda"}
        self._streams = [torch.cuda.Stream(gpu) for gpu in sorted(gpus, key=str)]
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
        """Block until all copies so far have arrived in host memory."""
        for stream in self._streams:
            stream.synchronize()

    def __exit__(self, *exc: object) -> None:
        self.wait()
        self._stack.close()
