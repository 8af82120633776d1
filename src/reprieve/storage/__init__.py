"""Where bytes live. `disk` is the only module of the package that changes a file system."""
