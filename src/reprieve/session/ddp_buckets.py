"""DDP reduces gradients in the same order after a resume as before it.

After its first backward DDP sorts its buckets anew, in the order in which gradients became ready. A process that has
just started has not done that yet: with three ranks and more its first step adds the same numbers in another order, and
gives other last bits than the undisturbed run. So the order is noted in the first backward, saved, and on resume
a backward without a model, whose gradients are nothing and become ready in that order, comes first.
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
        # In `no_sync` DDP does not look either.
        if self._ddp.require_backward_grad_sync and len(self.order) < len(self._names):
            self.order.append(self._names[parameter])

    def known(self) -> list[str]:
        """After a step: what was noted in its backward. The hooks are gone then."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self.order

    def take(self, order: Sequence[str]) -> None:
        """On resume: as in the process before."""
        self.known()
        by_name = {name: parameter for parameter, name in self._names.items()}
        if set(order) != set(by_name):
            return  # not all of them took part: then DDP does not sort its buckets either
        if self._ddp.static_graph:
            log.warning("DDP with static_graph: the first step after a resume may differ in its last bits (3+ ranks)")
            return
        self.order = list(order)
        _backward(self._ddp, [by_name[name] for name in order])


def watch(modules: Mapping[str, nn.Module]) -> dict[str, BucketOrder]:
    """By name, for those that are DDP and sort their buckets."""
    found = {}
    for name, wrapped in modules.items():
        module = wrapped
        while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters:
            found[name] = BucketOrder(module)
    return found


class _Nothing(nn.Module):
    """Depends on the parameters, by nothing."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._in_order = list(parameters)

    def forward(self) -> Tensor:
        # The backward takes what was made last first, and runs through to the parameter before the next.
        device = self._in_order[0].device
        nothing = [p.flatten()[:0].abs().sum().to(device, torch.float32) for p in reversed(self._in_order)]
        return torch.stack(nothing).sum()


def _backward(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    before = [parameter.grad for parameter in parameters]
    model, sync = ddp.module, ddp.require_forward_param_sync
    ddp._modules["module"] = _Nothing(parameters)
    ddp.require_forward_param_sync = False  # of buffers, which that has none of
    try:
        with torch.enable_grad():
            ddp().backward()
    finally:
        ddp._modules["module"], ddp.require_forward_param_sync = model, sync
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
