"""The life of a checkpoint in its folder: lease, commit, catalog, verification, retention."""
