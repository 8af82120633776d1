"""Agreement between the processes of a job: a store that all of them see, and operations with time limits on it."""
