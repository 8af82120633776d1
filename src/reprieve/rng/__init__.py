"""The random number generators of one process: captured, compared and restored. Nothing here draws a number."""

from __future__ import annotations

from reprieve.rng.state import RngSnapshot, capture_rng, check_rng, restore_rng, snapshot_rng

__all__ = ["RngSnapshot", "capture_rng", "check_rng", "restore_rng", "snapshot_rng"]
