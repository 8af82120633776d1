"""Measurements of Reprieve, its peers and the disk itself: run `python -m benchmarks` in the repository's root."""
