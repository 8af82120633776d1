"""Signals reach the listener whatever the main thread does, and nobody's handlers are lost. Each test is a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_BEFORE = """
import os, signal, sys, threading, time
from datetime import timedelta
from reprieve.preemption.deadline import Grace
from reprieve.preemption.stop_listener import StopListener
from reprieve.preemption.signals import signal_watch

stop_called = threading.Event()
listener = StopListener(stop_called.set, grace=Grace(timedelta(seconds=30), "test"), notices="off")
"""


def run(script: str, *, code: int = 0, seconds: float = 60) -> str:
    program = _BEFORE + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_signal_is_noted_with_its_deadline() -> None:
    run("""
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_called.wait(5)
        assert listener.stop.reason == "SIGTERM" and listener.stop.signal == signal.SIGTERM
        assert 29 < listener.stop.remaining_s() <= 30
    """)


def test_the_main_thread_is_in_c_code() -> None:
    run("""
        import torch
        listener.start()
        torch.set_num_threads(1)
        big = torch.rand(2500, 2500)
        seen = []
        def send():
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            stop_called.wait(5)
            seen.append(time.monotonic())
        thread = threading.Thread(target=send)
        thread.start()
        started = time.monotonic()
        torch.linalg.svd(big)  # one call; no bytecode of the main thread runs in it
        ended = time.monotonic()
        thread.join()
        assert ended - started > 0.5, "the call was too short to show anything"
        assert seen[0] < ended - 0.2, (seen[0] - started, ended - started)
    """)


def test_two_signals_are_one_stop_with_the_first_deadline() -> None:
    run("""
        calls = []
        listener = StopListener(lambda: calls.append(1), grace=Grace(timedelta(seconds=30), "test"), notices="off")
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        first = listener.stop
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert listener.stop is first and calls == [1], calls
    """)


def test_other_signals_by_choice_and_sigint_left_alone() -> None:
    run("""
        signals = ("USR1", signal.SIGTERM)
        listener = StopListener(stop_called.set, grace=Grace(None, "test"), signals=signals, notices="off")
        before = signal.getsignal(signal.SIGINT)
        listener.start()
        assert signal.getsignal(signal.SIGINT) is before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop_called.wait(5) and listener.stop.reason == "SIGUSR1" and listener.stop.deadline is None
    """)


def test_closing_puts_everything_back() -> None:
    run(
        """
        mine = lambda number, frame: None
        signal.signal(signal.SIGTERM, mine)
        read, write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write)
        listener.start()
        listener.close()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.set_wakeup_fd(-1) == write
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        again = StopListener(stop_called.set, grace=Grace(None, ""), notices="off")
        again.start()
        again.close()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        """,
        code=-15,
    )


def test_a_handler_that_was_there_is_called_once_and_later() -> None:
    run("""
        calls = []
        signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_called.wait(5)
        assert calls == []
        listener.call_previous_handler()
        assert calls == [signal.SIGTERM]
    """)


def test_another_wake_up_descriptor_still_gets_its_bytes() -> None:
    run("""
        read, write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write)
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_called.wait(5)
        time.sleep(0.1)
        assert os.read(read, 10) == bytes([signal.SIGTERM])
    """)


def test_a_descriptor_whose_number_is_used_again_gets_nothing() -> None:
    run("""
        read, write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write)
        listener.start()
        os.close(write)
        other_read, other_write = os.pipe2(os.O_NONBLOCK)
        assert other_write == write or other_read == write
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_called.wait(5)
        time.sleep(0.1)
        try:
            got = os.read(other_read, 10)
        except BlockingIOError:
            got = b""
        assert got == b"", got
    """)


@pytest.mark.parametrize("order", ["before", "after"])
def test_asyncio_in_the_main_thread(order: str) -> None:
    """asyncio takes the wake-up descriptor for its own handlers, and clears it when they go."""
    run(f"""
        import asyncio
        heard = []
        async def main():
            loop = asyncio.get_running_loop()
            if {order!r} == "before":
                loop.add_signal_handler(signal.SIGUSR1, heard.append, "usr1")
            listener.start()
            if {order!r} == "after":
                loop.add_signal_handler(signal.SIGUSR1, heard.append, "usr1")
            listener.reassert_signals()
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):
                await asyncio.sleep(0.02)
                if stop_called.is_set() and heard:
                    break
            assert stop_called.is_set()
            assert heard == ["usr1"], heard
            loop.remove_signal_handler(signal.SIGUSR1)
        asyncio.run(main())
        listener.reassert_signals()
    """)


def test_asyncio_handles_the_same_signal() -> None:
    """Both hear it."""
    run("""
        import asyncio
        heard = []
        async def main():
            listener.start()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, "term")
            listener.reassert_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):
                await asyncio.sleep(0.02)
                if stop_called.is_set() and heard:
                    break
            assert stop_called.is_set() and heard == ["term"], heard
        asyncio.run(main())
    """)


def test_a_forked_child_can_be_terminated_and_we_do_not_hear_of_it() -> None:
    run("""
        import multiprocessing
        listener.start()
        for _ in range(3):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(5)
            assert child.exitcode == -signal.SIGTERM, child.exitcode
        time.sleep(0.2)
        assert not stop_called.is_set() and listener.stop is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_called.wait(5)
    """)


def test_a_busy_pool_ends_with_its_process() -> None:
    run(
        """
        import multiprocessing
        listener.start()
        pool = multiprocessing.get_context("fork").Pool(2)
        pool.map_async(time.sleep, [60, 60])
        time.sleep(0.3)
        pool.terminate()
        pool.join()
        assert listener.stop is None
        """,
        seconds=20,
    )


def test_not_on_the_main_thread() -> None:
    run("""
        def work():
            listener.start()
            assert not listener.handles_signals
            listener.reassert_signals()
            listener.request("pause button")
            assert stop_called.wait(5) and listener.stop.reason == "pause button"
            listener.close()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert stop_called.is_set()
    """)


def test_on_another_thread_where_the_main_one_was_ready() -> None:
    run("""
        signal_watch.install([signal.SIGTERM])
        def work():
            listener.start()
            assert listener.handles_signals
            listener.reassert_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_called.wait(5) and listener.stop.reason == "SIGTERM"
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert stop_called.is_set()
    """)


def test_who_is_ready_and_has_no_listener_ends_as_ever() -> None:
    """Also while the main thread is in C code."""
    run(
        """
        import hashlib
        signal_watch.install([signal.SIGTERM])
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        """,
        code=143,
        seconds=20,
    )


def test_a_handler_from_before_is_called_while_nobody_listens() -> None:
    run("""
        called = []
        signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        signal_watch.install([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert called == [signal.SIGTERM]
    """)


def test_kill_wait() -> None:
    run("""
        listener = StopListener(stop_called.set, grace=Grace(None, ""), kill_wait=timedelta(seconds=0.5), notices="off")
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        started = time.monotonic()
        assert stop_called.wait(5) and time.monotonic() - started > 0.4
    """)
