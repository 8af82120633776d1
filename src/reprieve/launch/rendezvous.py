"""torchrun's static rendezvous: whether an earlier start of this node still takes part where the nodes meet.

The nodes meet in a store that torchrun serves on node 0, and every start of a job uses the same name and port. While a
predecessor still saves, the name may lead to its store. torchrun would join that one, find in it that all nodes have
arrived, and start its ranks. They would meet nobody: node 0 waits for this node in a store of its own, for as long as
the timeout of the rendezvous says, which may be days. So the launcher waits until the predecessor's store is gone.

A job of one node needs that, too, if it got the address of a master (Kubeflow Trainer gives one to every job): torchrun
and its ranks connect to the store of this node by that name.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from reprieve.errors import RanksError
from reprieve.launch.node_share import find_node_share, launcher_options
from reprieve.ranks.torch_store import TorchStore

_PROBE_LIMIT = timedelta(seconds=2)
"""A store that takes longer to answer belongs to a process that is stopped, or to a pod that is gone."""
_DEFAULT_PORT = 29500
_DEFAULT_ID = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRendezvous:
    """Where this node meets the others."""

    host: str
    port: int
    node: int
    id: str = _DEFAULT_ID

    def has_predecessor(self) -> bool:
        """Whether a store that the name leads to already knows this node, which has not joined any yet."""
        return any(self._knows_this_node(address) for address in self._addresses())

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return []  # torchrun waits for the name
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def _knows_this_node(self, address: str) -> bool:
        # A private key of torch (elastic/agent/server/api.py), as of 2.13. Where it differs, nothing is found.
        try:
            store = TorchStore(address, self.port, limit=_PROBE_LIMIT, retry=False)
            with contextlib.closing(store):
                return store.get(f"{self.id}/torchelastic/role_info/{self.node}") is not None
        except RanksError:
            return False


def find_static_rendezvous(words: Sequence[str], env: Mapping[str, str]) -> StaticRendezvous | None:
    """Return the rendezvous of a torchrun command with a master address; None: there is none, or it is not static."""
    options = launcher_options(words)
    share = find_node_share(words, env)

    def setting(name: str, default: str = "") -> str:
        return options.get(name) or env.get(f"PET_{name.upper().replace('-', '_')}") or default

    # For one node without a port, torchrun ignores the address and meets on the loopback.
    host, port = setting("master-addr"), setting("master-port", "" if share.nodes == 1 else str(_DEFAULT_PORT))
    if share.node is None or not host or not port.isdecimal():
        return None
    if "standalone" in options or setting("standalone", "0") != "0":
        return None
    if setting("rdzv-backend", "static") != "static" or setting("rdzv-endpoint"):
        return None
    return StaticRendezvous(host=host, port=int(port), node=share.node, id=setting("rdzv-id", _DEFAULT_ID))
