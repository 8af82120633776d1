"""A time limit that loses no cancellation."""

from __future__ import annotations

import asyncio

import pytest

from reprieve.kubernetes.api import within


def test_it_returns_raises_and_times_out() -> None:
    async def fail() -> None:
        raise ValueError("a reason")

    async def run() -> None:
        assert await within(1, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="a reason"):
            await within(1, fail())
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, asyncio.sleep(10))

    asyncio.run(run())


def test_a_cancellation_at_the_moment_of_the_result_is_not_lost() -> None:
    async def run() -> None:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(within(10, result))
        await asyncio.sleep(0.01)
        result.set_result(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_who_is_cancelled_cancels_the_work() -> None:
    async def run() -> None:
        work = asyncio.create_task(asyncio.sleep(10))
        waiting = asyncio.create_task(within(10, work))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.cancelled()

    asyncio.run(run())
