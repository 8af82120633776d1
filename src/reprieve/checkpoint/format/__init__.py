"""What the bytes of a checkpoint are: file layouts, shards, checksums and the manifest. No I/O happens here."""
