"""Public API for Hugging Face trainers: `reprieve.transformers.protect(trainer)`. See docs/transformers.md."""

from __future__ import annotations

from reprieve.errors import needing

with needing("reprieve.transformers"):
    from reprieve.adapters.transformers import protect, protect_all

__all__ = ["protect", "protect_all"]
