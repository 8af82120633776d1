"""One restore: choose the newest valid checkpoint, prepare, read and verify, apply."""
