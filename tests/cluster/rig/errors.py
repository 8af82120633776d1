"""What goes wrong with the test cluster and has a reason that the user can act on."""


class RigError(Exception):
    """The cluster cannot be built, started or removed. The message says why, and what to do."""
