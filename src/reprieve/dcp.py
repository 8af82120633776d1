"""PyTorch Distributed Checkpoint (DCP) on Reprieve's engine: pass these to `dcp.save`, `dcp.async_save` and `dcp.load`.

    dcp.save(state, storage_writer=StorageWriter("checkpoints/step-100"))
    dcp.load(state, storage_reader=StorageReader("checkpoints/step-100"))

DCP decides which rank saves what; Reprieve decides how it reaches the disk: direct I/O, a checksum for each block, and
a checkpoint that becomes visible only when it is complete and durable. The files are DCP's own (`.distcp` and
`.metadata`): stock DCP loads them, and the reader loads stock ones. See docs/dcp.md.
"""

from __future__ import annotations

from reprieve.errors import needing

with needing("reprieve.dcp"):
    from reprieve.adapters.dcp.reader import StorageReader
    from reprieve.adapters.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
