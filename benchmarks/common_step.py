"""The cost of the common-step protocol while there is no request: `python -m benchmarks.common_step`.

It runs a job of real ranks, which have a process group and train (a small all-reduce per step), so that watchers and
talkers exist. It measures `boundary` alone, and counts what is sent meanwhile to the other ranks and to the store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

CALLS = 200
"""Per reading of the clock: enough for the clock not to matter, and over before the kernel gives the core away."""

REPEATS = 100


@dataclass(frozen=True)
class SteadyCost:
    boundary_us: float
    """The median over all ranks and repeats."""
    collectives: int
    """Those beyond the training's own, on all ranks."""
    messages: int
    """Messages to the store."""


def steady_cost_us(world_size: int = 4) -> float:
    """Measure a boundary without a request, in microseconds."""
    return steady_cost(world_size).boundary_us


def steady_cost(world_size: int = 4) -> SteadyCost:
    from reprieve.testing import run_ranks, values

    ranks = values(run_ranks(world_size, measure_rank))
    return SteadyCost(
        boundary_us=median(cost for costs, _, _ in ranks for cost in costs),
        collectives=sum(collectives for _, collectives, _ in ranks),
        messages=sum(messages for _, _, messages in ranks),
    )


def measure_rank() -> tuple[list[float], int, int]:
    """Return the microseconds of each repeat, and the collectives and messages beyond the training's own."""
    import torch
    import torch.distributed as dist

    from reprieve.ranks.group import Ranks
    from reprieve.ranks.step_agreement import StepAgreement
    from reprieve.ranks.tcp_client import TcpClient

    messages = 0
    send = TcpClient.send

    def counted(connection: TcpClient, data: bytes) -> None:
        nonlocal messages
        messages += 1
        send(connection, data)

    group: Any = dist.distributed_c10d._get_default_group()  # untyped: torch does not declare what it counts
    ranks = Ranks.detect()
    costs = []
    with StepAgreement(ranks, completed=0) as common:
        setattr(TcpClient, "send", counted)  # noqa: B010 - this process exists only for the measurement
        ranks.agree("all are there")
        before = -1
        while before != messages:  # until all threads are in their waits
            before = messages
            time.sleep(0.2)
        collectives = group._get_sequence_number_for_group()
        for repeat in range(REPEATS):
            dist.all_reduce(torch.ones(1))
            first = repeat * CALLS + 1
            begun = time.perf_counter()
            for completed in range(first, first + CALLS):
                common.boundary(completed)
            costs.append((time.perf_counter() - begun) / CALLS * 1e6)
        collectives = group._get_sequence_number_for_group() - collectives - REPEATS
        sent = messages - before
    ranks.close()
    return costs, collectives, sent


if __name__ == "__main__":
    print(steady_cost())
