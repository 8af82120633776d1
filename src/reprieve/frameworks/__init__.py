"""One thin adapter for each way of writing a training loop."""
