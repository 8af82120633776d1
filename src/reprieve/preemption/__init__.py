"""Stop requests: signals, cloud notices, the stop listener, and how the process exits."""
