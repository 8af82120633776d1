"""When to stop: signals, notices, the guard."""
