"""What ranks may rely on in a store: one contract suite for every implementation."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import RanksError, StoreLost
from reprieve.ranks import timed_calls
from reprieve.ranks.folder_store import FolderStore
from reprieve.ranks.store import Store, prefixed
from reprieve.ranks.timed_calls import TimedCaller
from reprieve.ranks.torch_store import PART_BYTES, TorchStore
from tests.support.memory_store import MemoryStore

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=20)

SERVER = """
import time
from reprieve.ranks.torch_store import TorchStore
served = TorchStore.serve()
print(served.port, flush=True)
"""


@pytest.fixture(params=["torch", "torch without libuv", "folder", "memory", "prefixed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "folder":
        made = FolderStore(tmp_path / "keys")
    elif request.param == "memory":
        made = MemoryStore()
    elif request.param == "torch":
        made = TorchStore.serve()
    elif request.param == "torch without libuv":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # As torchrun serves it with USE_LIBUV=0.
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False)
        made = TorchStore("127.0.0.1", server.port)
        made._server = server
    else:
        made = prefixed(TorchStore.serve(), "some/prefix")
    yield made
    made.close()


def each(store: Store, count: int, work: Callable[[Store, int], object]) -> list[object]:
    """Run `work` in as many threads at once, each with its own client."""
    clients = [store.client() for _ in range(count)]
    together = threading.Barrier(count)

    def run(number: int) -> object:
        together.wait()
        return work(clients[number], number)

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(run, range(count)))
    for client in clients:
        client.close()
    return results


# The verbs


@pytest.mark.parametrize("value", [b"value", b"", b"\0\xff\n=", b"+1", b"?", b"7", b"x" * 100_000])
def test_what_was_set_is_there_for_all(store: Store, value: bytes) -> None:
    other = store.client()
    store.set("key", value)
    assert other.get("key") == value
    assert other.wait("key", SOON) == value
    assert other.put_once("key", b"other") == value
    other.set("key", b"another")
    assert store.get("key") == b"another"
    other.close()


def test_a_key_that_is_not_there(store: Store) -> None:
    begun = time.monotonic()
    assert store.get("key") is None
    assert time.monotonic() - begun < 5
    store.delete("key")
    assert store.get("key") is None


@pytest.mark.parametrize("key", ["a/b", "a b", ".", "..", ".lock", "ä→", "%2F", "a" * 300, "a" * 299 + "b", "a+b"])
def test_keys_are_any_text(store: Store, key: str) -> None:
    store.set(key, b"value")
    assert store.get(key) == b"value"
    assert store.get(f"{key}x") is None
    assert store.get("a" * 298 + "cc") is None
    store.delete(key)
    assert store.get(key) is None


def test_values_of_many_megabytes(store: Store) -> None:
    for size in (PART_BYTES - 1, PART_BYTES, 3 * PART_BYTES + 1):
        value = os.urandom(1000) + bytes(size - 1000)
        store.set("set", value)
        assert store.get("set") == value
        assert store.put_once("once", value) == value
        assert store.put_once("once", bytes(size + 1)) == value
        store.delete("set")
        store.delete("once")


def test_counting(store: Store) -> None:
    assert store.add("count", 2) == 2
    assert store.add("count", 40) == 42
    assert store.get("count") == b"42"
    assert store.add("count", -43) == -1
    store.delete("count")
    assert store.add("count", 1) == 1


def test_everybody_who_counts_gets_another_number(store: Store) -> None:
    numbers = each(store, 8, lambda client, _: [client.add("count", 1) for _ in range(20)])
    assert sorted(number for some in numbers for number in some) == list(range(1, 161))  # type: ignore[attr-defined]


def test_the_first_writer_wins(store: Store) -> None:
    for race in range(20):
        held = each(store, 6, lambda client, number, race=race: client.put_once(f"race {race}", b"%d" % number))
        assert len(set(held)) == 1
        assert held[0] == store.get(f"race {race}")


def test_the_first_writer_wins_among_processes(tmp_path: Path) -> None:
    script = (
        "import sys; from reprieve.ranks.folder_store import FolderStore; s = FolderStore(sys.argv[1]);\n"
        "while s.get('go') is None: pass\n"
        "print([int(s.put_once(f'race {n}', sys.argv[2].encode())) for n in range(200)], s.add('sum', 7))"
    )
    store = FolderStore(tmp_path)
    racers = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    time.sleep(0.5)
    store.set("go", b"")
    outputs = [racer.communicate(timeout=60)[0].split("] ") for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len({held for held, _ in outputs}) == 1
    assert sorted(int(total) for _, total in outputs) == [7, 14, 21]


@pytest.mark.parametrize("verb", ["set", "put_once", "add", "set much", "put much once"])
def test_wait_ends_when_the_key_comes(store: Store, verb: str) -> None:
    other = store.client()
    much = bytes(PART_BYTES + 1)
    act, value = {
        "set": (lambda: other.set("late", b"1"), b"1"),
        "put_once": (lambda: other.put_once("late", b"2"), b"2"),
        "add": (lambda: other.add("late", 3), b"3"),
        "set much": (lambda: other.set("late", much), much),
        "put much once": (lambda: other.put_once("late", much), much),
    }[verb]
    later = threading.Timer(0.1, act)
    later.start()
    begun = time.monotonic()
    assert store.wait("late", LONG) == value
    assert 0.05 < time.monotonic() - begun < 10
    later.join()
    other.close()


def test_wait_has_a_limit_and_the_store_works_after_it(store: Store) -> None:
    for _ in range(3):
        begun = time.monotonic()
        assert store.wait("never", SOON) is None
        assert 0.04 < time.monotonic() - begun < 5
    assert store.wait("never", timedelta(0)) is None
    store.set("never", b"now")
    assert store.wait("never", timedelta(0)) == b"now"


def test_a_wait_that_runs_out_as_the_key_comes_stays_in_step(store: Store) -> None:
    """The answer and the cancelled wait may cross on the wire."""
    other = store.client()
    seen = 0
    for number in range(60):
        setter = threading.Timer(0.01, other.set, [f"key {number}", b"value"])
        setter.start()
        seen += store.wait(f"key {number}", timedelta(milliseconds=8 + number % 6)) is not None
        setter.join()
        assert store.get(f"key {number}") == b"value"
    other.close()


def test_wait_for_a_year(store: Store) -> None:
    store.set("key", b"value")
    assert store.wait("key", timedelta(days=365)) == b"value"


def test_a_client_that_was_closed_is_lost(store: Store) -> None:
    other = store.client()
    other.close()
    for verb in verbs(other).values():
        with pytest.raises(StoreLost, match="closed"):
            verb()
    store.set("key", b"value")
    assert store.get("key") == b"value"


def test_prefixes_keep_keys_apart(store: Store) -> None:
    first, second = prefixed(store, "one"), prefixed(prefixed(store, "two"), "deep")
    assert first.put_once("key", b"1") == b"1"
    assert second.put_once("key", b"2") == b"2"
    assert store.get("one/key") == b"1"
    assert store.get("two/deep/key") == b"2"
    assert second.add("count", 1) == 1
    second.delete("key")
    other = first.client()
    assert (other.get("key"), other.wait("key", SOON), second.get("key")) == (b"1", b"1", None)
    other.set("key", b"3")
    assert first.get("key") == b"3"
    other.close()


# When the store is lost


def verbs(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "set": lambda: store.set("key", b"value"),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("count", 1),
        "put_once": lambda: store.put_once("once", b"value"),
        "wait": lambda: store.wait("never", timedelta(milliseconds=200)),
        "delete": lambda: store.delete("key"),
    }


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{SERVER}time.sleep(1000)"], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_a_server_that_was_killed_is_lost_at_once(
    server: tuple[subprocess.Popen[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    process, port = server
    clients = {name: TorchStore("127.0.0.1", port) for name in [*verbs(MemoryStore()), "waits", "client"]}
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(clients["waits"].wait, "never", timedelta(hours=1))
        time.sleep(0.2)
        begun = time.monotonic()
        process.kill()
        with pytest.raises(StoreLost, match=f"127.0.0.1:{port}.*closed the connection"):
            waits.result(20)
        assert time.monotonic() - begun < 5
    for name, client in clients.items():
        if name in verbs(client):
            with pytest.raises(StoreLost):
                verbs(client)[name]()
            with pytest.raises(StoreLost):
                verbs(client)[name]()
    with pytest.raises(StoreLost):
        clients["client"].client()
    assert time.monotonic() - begun < 5
    assert capfd.readouterr().err == ""


def test_a_server_that_hangs_is_lost_after_the_limit(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    limit = timedelta(milliseconds=300)
    clients = {name: TorchStore("127.0.0.1", port, limit=limit) for name in [*verbs(MemoryStore()), "client"]}
    process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    for name, client in clients.items():
        begun = time.monotonic()
        with pytest.raises(StoreLost, match=r"no answer within 0.3 s"):
            verbs(client).get(name, client.client)()
        assert time.monotonic() - begun < 3
        begun = time.monotonic()
        if name in verbs(client):
            with pytest.raises(StoreLost):
                verbs(client)[name]()
            assert time.monotonic() - begun < 0.2


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StoreLost, match="refused"):
        TorchStore("127.0.0.1", port, limit=timedelta(milliseconds=200))
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(TorchStore, "127.0.0.1", port)
        time.sleep(0.2)
        serving = TorchStore.serve(port=port)
        early.result(20).set("key", b"value")
    assert serving.get("key") == b"value"


def test_a_server_whose_name_and_network_are_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name exists once it is scheduled, its address answers once its network is up."""
    import socket

    not_yet = [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError("timed out"),
    ]
    serving, connect = TorchStore.serve(), socket.create_connection

    def fails_first(*args: Any, **options: Any) -> socket.socket:
        if not_yet:
            raise not_yet.pop(0)
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", fails_first)
    TorchStore(serving.host, serving.port, limit=timedelta(seconds=20)).set("key", b"value")
    assert not not_yet
    assert serving.get("key") == b"value"


def test_an_unknown_name_is_reported_after_the_limit() -> None:
    begun = time.monotonic()
    with pytest.raises(StoreLost, match=r"store at no-such-host.invalid:1 .* is lost: "):
        TorchStore("no-such-host.invalid", 1, limit=timedelta(seconds=1))
    assert 0.5 < time.monotonic() - begun < 20


def test_something_else_that_listens_is_no_store() -> None:
    import socket

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(StoreLost, match="does not speak"):
            TorchStore("127.0.0.1", listener.getsockname()[1])
        thread.join()


def test_a_thread_that_waits_ends_when_its_client_is_closed() -> None:
    store = TorchStore.serve()
    waiting = store.client()
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(waiting.wait, "never", timedelta(hours=1))
        time.sleep(0.1)
        waiting.close()
        with pytest.raises(StoreLost, match="closed here"):
            waits.result(10)
    store.close()


def test_two_threads_on_one_client_are_told_so() -> None:
    store = TorchStore.serve(limit=timedelta(milliseconds=200))
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(store.wait, "key", LONG)
        time.sleep(0.1)
        with pytest.raises(RanksError, match=r"client\(\)"):
            store.get("key")
        store.client().set("key", b"value")
        assert waits.result() == b"value"
    store.close()


def test_an_exception_in_a_wait_leaves_the_client_usable() -> None:
    """As a signal handler would raise it: the interrupted answer does not become the answer to the next call."""
    store = TorchStore.serve()
    other = store.client()

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(KeyboardInterrupt):
            store.wait("key", LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    other.set("key", b"value")
    assert store.add("count", 5) == 5
    assert store.get("key") == b"value"
    store.close()
    other.close()


def test_torch_reads_what_we_count_and_its_parts_are_removed() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TorchStore.serve()
    torchs = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    assert store.add("count", 4) == 4
    assert torchs.get("count") == b"4"
    torchs.set("from torch", "text")
    assert store.wait("from torch", LONG) == b"text"
    before = store.key_count()
    store.set("large", bytes(3 * PART_BYTES))
    store.put_once("large", bytes(2 * PART_BYTES))
    assert store.key_count() == before + 4
    store.delete("large")
    assert store.key_count() == before
    store.close()


def test_ending_while_the_store_ends_keeps_the_exit_code() -> None:
    """Threads still wait in the store when the process and the store end."""
    script = (
        f"{SERVER}import sys, threading; from datetime import timedelta; store = TorchStore.serve()\n"
        "clients = [store.client() for _ in range(5)]\n"
        "for c in clients: threading.Thread(target=c.wait, args=('never', timedelta(1)), daemon=True).start()\n"
        "time.sleep(0.2); sys.exit(143)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "terminate" in ended.stderr) == (143, False), ended.stderr


def test_a_folder_that_is_gone_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    clients = {name: FolderStore(folder) for name in verbs(MemoryStore())}
    shutil.rmtree(folder)
    for name, client in clients.items():
        for _ in range(2):
            with pytest.raises(StoreLost, match=str(folder)):
                verbs(client)[name]()
        client.close()


def test_a_lock_that_is_never_given_back_is_lost(tmp_path: Path) -> None:
    import fcntl

    store = FolderStore(tmp_path, limit=timedelta(milliseconds=200))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreLost, match=r"no answer within 0.2 s"):
            store.add("count", 1)
    store.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreLost, match="file"):
        FolderStore(tmp_path / "file" / "keys")


def test_errands_end_with_their_user() -> None:
    def threads() -> int:
        return sum("ends with me" in thread.name for thread in threading.enumerate())

    some = TimedCaller("ends with me")
    assert some.run(lambda: 1, LONG) == 1
    with pytest.raises(ZeroDivisionError):
        some.run(lambda: 1 / 0, LONG)
    with pytest.raises(timed_calls.FutureTimeout):
        some.run(lambda: exec("raise TimeoutError"), LONG)
    assert threads() == 1
    del some
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0


def test_a_server_may_listen_on_one_address_alone() -> None:
    """On another than the loopback, the server's own client finds it, too: a node of a cluster serves on its own."""
    with contextlib.closing(TorchStore.serve("127.0.0.2")) as store:
        store.set("a", b"1")
        with contextlib.closing(TorchStore("127.0.0.2", store.port)) as other:
            assert other.get("a") == b"1"
