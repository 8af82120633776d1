"""`reprieve.transformers.protect(trainer)`."""

from __future__ import annotations

from reprieve.adapters.transformers import protect

__all__ = ["protect"]
