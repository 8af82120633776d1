"""What the driver, the controller and the workers of a run tell each other, through the cluster and the store."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass

PARKED = "parked"
"""A counter in the store of a generation: the workers that have handed their process back."""
SAVED = "saved"
"""A key in the store of a generation: the last step, in digits, if its workers have saved it at their stop."""
DRIVER_STOP = "stop"
"""The key of a `DriverStop` in the store."""


def store_key(run_id: str) -> str:
    """The key of the cluster under which a controller publishes a `StoreAddress`."""
    return f"store/{run_id}"


def stop_key(run_id: str) -> str:
    """The key of the cluster for a `DriverStop` that came before there was a store."""
    return f"stop/{run_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the controller serves the store. The store has no passwords: all keys begin with a secret."""

    host: str
    port: int
    secret: str

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> StoreAddress:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStop:
    """A stop request reached the driver: all workers save, and the run ends."""

    reason: str
    deadline: float | None
    """In seconds since the epoch; None: no deadline is certain."""

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> DriverStop:
        return cls(**json.loads(data))

    def remaining_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.time()
