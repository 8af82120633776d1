"""What the launcher keeps about a run, and what it decides: record, outcome, restarts, goodput."""
