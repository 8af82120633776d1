"""Finds the ranks of a job and the store that they share, at the start of a process.

In this order:

0. what a framework knows that has started this process (`provide`);
1. `REPRIEVE_STORE` (`tcp://host:port[/prefix]` or `file:///folder`), with `RANK` and `WORLD_SIZE`;
2. torchrun: our own client of the agent's store, which exists before the process group does;
3. torch.distributed is initialised: rank 0 serves a store, the others learn its address through the process group's;
4. a world of one.

Keys begin with torchrun's run ID and restart count, which distinguish this start of the job from others in the same
store, and with the number of the call in this process: every rank must call `detect` equally often.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reprieve.errors import ConfigError, RankFailed, StoreLost
from reprieve.ranks.folder_store import FolderStore
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.ranks.store import Store, prefixed

if TYPE_CHECKING:
    from reprieve.ranks.torch_store import TorchStore

_calls = itertools.count()

_provided: tuple[int, int, Store] | None = None
"""The rank, the number of ranks and the store that a framework gave to this process."""

_served: tuple[Any, Store] | None = None
"""The process group's store, and our store beside it: served here (rank 0) or found (other ranks)."""

_HELP = "Start it with torchrun, call torch.distributed.init_process_group first, or set REPRIEVE_STORE=tcp://host:port"


def provide(rank: int, world_size: int, store: Store) -> None:
    """Make this process a rank of the job of a framework, which may set no variables for it."""
    global _provided  # noqa: PLW0603 - a process is one rank
    _provided = (rank, world_size, store)


def detect(limit: timedelta = LIMIT) -> Ranks:
    """Return the ranks of this job, with their own connection to the store."""
    number = next(_calls)
    if _provided is not None:
        rank, world_size, store = _provided
        return Ranks(rank, world_size, prefixed(store.client(), str(number)) if world_size > 1 else None, limit=limit)
    group = _process_group()
    address = os.environ.get("REPRIEVE_STORE")
    torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if group is not None and not address and not torchrun:
        rank, world_size = group.get_rank(), group.get_world_size()
    else:
        rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if world_size == 1:
        return Ranks.alone()
    if address:
        store = _open(address)
    elif torchrun:
        from reprieve.ranks.torch_store import TorchStore

        store = TorchStore(os.environ["MASTER_ADDR"], _number("MASTER_PORT"))
    elif group is not None:
        store = _beside_process_group(group, rank, limit)
    else:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, and there is no store for the ranks to communicate through. {_HELP}"
        )
    start = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    prefix = "/".join(["reprieve", *filter(None, start), str(number)])
    serves = rank == 0 and not address and not torchrun
    return Ranks(rank, world_size, prefixed(store, prefix), limit=limit, serves=serves)


def _process_group() -> Any:
    """Return torch.distributed, if it is imported and initialised."""
    distributed: Any = sys.modules.get("torch.distributed")
    return (
        distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
    )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, which is not a number. {_HELP}") from None


def _open(address: str) -> Store:
    url = urlsplit(address)
    if url.scheme == "tcp" and url.hostname and url.port:
        from reprieve.ranks.torch_store import TorchStore

        store = TorchStore(url.hostname, url.port)
        return prefixed(store, url.path.strip("/")) if url.path.strip("/") else store
    if url.scheme == "file" and url.path and not url.netloc:
        return FolderStore(url.path)
    raise ConfigError(f"REPRIEVE_STORE is {address!r}: write tcp://host:port or file:///folder")


def _beside_process_group(group: Any, rank: int, limit: timedelta) -> Store:
    """Return a client of the store that rank 0 serves as long as its process lives."""
    from reprieve.ranks.torch_store import TorchStore

    global _served  # noqa: PLW0603 - there is one default process group a process
    group_store = group.distributed_c10d._get_default_store()
    if _served is None or _served[0] is not group_store:
        if rank == 0:
            hosts = [host for host in (os.environ.get("MASTER_ADDR"), _own_address(), socket.gethostname()) if host]
            our_store = TorchStore.serve(_listen_address(hosts[0]))
            group_store.set("reprieve/store", " ".join([str(our_store.port), *hosts]))
        else:
            our_store = _find(group_store, limit)
        _served = (group_store, our_store)
    return _served[1].client()


def _find(group_store: Any, limit: timedelta) -> TorchStore:
    from reprieve.ranks.torch_store import TorchStore

    try:
        group_store.wait(["reprieve/store"], limit)
    except RuntimeError as error:
        raise RankFailed(0, f"did not publish the address of its store within {limit.total_seconds():g} s") from error
    port, *hosts = group_store.get("reprieve/store").decode().split()
    for host in hosts:
        try:
            return TorchStore(host, int(port), limit=min(limit, timedelta(seconds=10)))
        except StoreLost as error:
            lost = error
    raise lost


def _listen_address(host: str) -> str:
    """Return the loopback for a job on one machine; otherwise all interfaces, of the address family of `host`."""
    with contextlib.suppress(OSError):
        address = ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if address.is_loopback:
            return str(address)
        if address.version == 6:
            return "::"
    return "0.0.0.0"  # noqa: S104 - other machines must reach it


def _own_address() -> str | None:
    """Return the address by which others likely reach this host: the pod's, of whichever family. Connecting UDP sends
    nothing: it looks up a route."""
    if pod_ip := os.environ.get("POD_IP", "").strip():
        return pod_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
