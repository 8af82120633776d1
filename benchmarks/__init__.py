"""Measurements of Reprieve beside its peers and the disk itself: `python -m benchmarks` from the repository's root."""
