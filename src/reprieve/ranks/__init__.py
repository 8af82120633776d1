"""How the processes of a job agree: a store that all of them see, and operations with time limits on top of it."""
