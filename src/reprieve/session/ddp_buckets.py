"""Makes DDP reduce gradients in the same order after a resume as before it.

After its first backward DDP rebuilds its buckets in the order in which gradients became ready. A new process has not
done that yet: with three or more ranks its first step adds the same numbers in another order, and its last bits differ
from the undisturbed run. So the order is recorded in the first backward and saved. On resume a backward without a
model, whose empty gradients become ready in that order, runs first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("reprieve")


class BucketOrder:
    """The order in which the gradients of one DDP module become ready."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
        self.order: list[str] = []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in self._names]

    def _ready(self, parameter: Tensor) -> None:
        # In `no_sync` DDP does not record the order either.
        if self._ddp.require_backward_grad_sync and len(self.order) < len(self._names):
            self.order.append(self._names[parameter])

    def known(self) -> list[str]:
        """After a step: remove the hooks and return the order that they recorded."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self.order

    def take(self, order: Sequence[str]) -> None:
        """On resume: make DDP use the order of the interrupted process."""
        self.known()
        by_name = {name: parameter for parameter, name in self._names.items()}
        if set(order) != set(by_name):
            return  # not all parameters took part: then DDP does not rebuild its buckets either
        if self._ddp.static_graph:
            log.warning("DDP with static_graph: the first step after a resume may differ in its last bits (3+ ranks)")
            return
        self.order = list(order)
        _backward(self._ddp, [by_name[name] for name in order])


def watch(modules: Mapping[str, nn.Module]) -> dict[str, BucketOrder]:
    """Return a recorder for each DDP module that rebuilds its buckets, by name."""
    watchers = {}
    for name, wrapped in modules.items():
        module = wrapped
        while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters:
            watchers[name] = BucketOrder(module)
    return watchers


class _EmptyModel(nn.Module):
    """A module whose output depends on the parameters with empty gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._in_order = list(parameters)

    def forward(self) -> Tensor:
        # The backward visits the latest operation first, and reaches its parameter before the next operation.
        device = self._in_order[0].device
        terms = [p.flatten()[:0].abs().sum().to(device, torch.float32) for p in reversed(self._in_order)]
        return torch.stack(terms).sum()


def _backward(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    before = [parameter.grad for parameter in parameters]
    model, sync = ddp.module, ddp.require_forward_param_sync
    ddp._modules["module"] = _EmptyModel(parameters)
    ddp.require_forward_param_sync = False  # it would synchronize buffers, and this model has none
    try:
        with torch.enable_grad():
            ddp().backward()
    finally:
        ddp._modules["module"], ddp.require_forward_param_sync = model, sync
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
