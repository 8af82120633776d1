"""What the launcher records about a run and decides from it: record, outcome, restarts, goodput."""
