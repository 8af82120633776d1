"""PyTorch DCP's StorageWriter and StorageReader on the checkpoint engine. `reprieve.dcp` is the public API."""
