"""Turns pinned versions into the build output: binaries, manifests and image archives."""
