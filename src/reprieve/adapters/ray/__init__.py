"""Protects Ray Train: a stopped worker, a drained node or a stopped driver loses nothing. See docs/ray.md.

    driver          fit() ─► SIGTERM, launcher                                   driver.py
      │ callback (settings travel with it)                                       callback.py, config.py
    controller      the store of the ranks, the snapshot, progress               controller.py, snapshot.py, progress.py
      │             one live run a folder, the same Reprieve on all nodes        run_folder.py, node_check.py
      │ callback (with the store's address)
    worker          signals, drains ─► one common step ─► save ─► handed back    worker.py, reports.py, run.py

Everything that is private in Ray is in `internals.py`.
"""
