"""PyTorch DCP's StorageWriter and StorageReader on the checkpoint engine. The public names are in `reprieve.dcp`."""
