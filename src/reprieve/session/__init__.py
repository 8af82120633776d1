"""The runtime of a protected training: boundaries, saves, shutdown, reporting. Every adapter builds on it."""
