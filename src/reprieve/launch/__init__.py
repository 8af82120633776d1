"""`reprieve run`: starts a training command, supervises it, and reports how it ended."""
