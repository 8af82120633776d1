"""Where in the data a run is: the next start sees the very batches that this one would have seen."""
