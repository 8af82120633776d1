"""`reprieve.transformers.protect(trainer)`."""

from __future__ import annotations

from reprieve.frameworks.transformers import protect

__all__ = ["protect"]
