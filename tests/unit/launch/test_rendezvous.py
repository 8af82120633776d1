"""Where the nodes of a torchrun job meet, and whether an earlier start of a node is still there."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from reprieve.launch.rendezvous import StaticRendezvous, find_static_rendezvous
from reprieve.ranks.torch_store import TorchStore

TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}
"""What Kubeflow Trainer sets in a pod."""


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ("torchrun train.py", TRAINER, StaticRendezvous(host="train-node-0-0.train", port=29400, node=1)),
        (
            "torchrun --nnodes=2 --node-rank 0 --master_addr=a train.py",
            {},
            StaticRendezvous(host="a", port=29500, node=0),
        ),
        (
            "torchrun --rdzv-id=7 train.py",
            TRAINER,
            StaticRendezvous(host="train-node-0-0.train", port=29400, node=1, id="7"),
        ),
        (
            "torchrun train.py",
            {**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
            StaticRendezvous(host="train-node-0-0.train", port=29400, node=0),
        ),
        (
            "torchrun --master-addr=a --master-port=7 train.py",
            {},
            StaticRendezvous(host="a", port=7, node=0),
        ),
        ("torchrun --master-addr=a train.py", {}, None),
        ("torchrun --standalone train.py", {**TRAINER, "PET_NNODES": "1"}, None),
        ("torchrun train.py", {**TRAINER, "PET_NNODES": "1", "PET_STANDALONE": "1"}, None),
        ("torchrun train.py", {"PET_NNODES": "1", "PET_MASTER_PORT": "29400"}, None),
        ("torchrun train.py", {**TRAINER, "PET_NNODES": "1:4"}, None),
        ("torchrun --rdzv-backend=c10d --rdzv-endpoint=a:1 train.py", TRAINER, None),
        ("torchrun --nproc-per-node=2 train.py", {}, None),
        ("python train.py --master-addr=a --nnodes=2", {}, None),
    ],
)
def test_where_the_nodes_meet(words: str, env: dict[str, str], expected: StaticRendezvous | None) -> None:
    assert find_static_rendezvous(words.split(), env) == expected


@pytest.mark.parametrize("addresses", [["127.0.0.1", "127.0.0.9"], ["127.0.0.9", "127.0.0.1"]])
def test_a_store_that_knows_this_node_is_one_of_a_predecessor(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of node 0 leads to two pods while the earlier one still saves. The new one does not listen yet."""

    def resolve(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        found = addresses if host == "node-0" else [host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    store = TorchStore.serve("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    rendezvous = StaticRendezvous(host="node-0", port=store.port, node=1)
    assert not rendezvous.has_predecessor(), "nobody has joined it yet"
    store.set("none/torchelastic/role_info/0", b"{}")
    assert not rendezvous.has_predecessor(), "another node has joined it"
    store.set("none/torchelastic/role_info/1", b"{}")
    assert rendezvous.has_predecessor()


def test_what_is_no_store_has_no_predecessor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not StaticRendezvous(host="127.0.0.1", port=port, node=1).has_predecessor()
    assert not StaticRendezvous(host="127.0.0.1", port=port, node=1).has_predecessor(), "nobody listens"
    assert not StaticRendezvous(host="node-0.invalid", port=port, node=1).has_predecessor(), "no such name"
