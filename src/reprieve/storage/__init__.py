"""File systems and paths. `disk` is the only module that changes the durable content of a checkpoint."""
