"""`reprieve run`: starts a training command, looks after it, and says how it ended."""
