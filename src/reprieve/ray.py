"""Public API for Ray Train. See docs/ray.md.

from reprieve.ray import JITCheckpointConfig, RunConfig, should_checkpoint
"""

from __future__ import annotations

from reprieve.errors import needing

with needing("reprieve.ray"):
    from reprieve.adapters.ray.callback import JITCheckpointCallback
    from reprieve.adapters.ray.config import JITCheckpointConfig, RunConfig
    from reprieve.adapters.ray.driver import protect
    from reprieve.adapters.ray.run import Run
    from reprieve.adapters.ray.worker import should_checkpoint

__all__ = ["JITCheckpointCallback", "JITCheckpointConfig", "Run", "RunConfig", "protect", "should_checkpoint"]
