"""The status controller's plumbing: it observes, lets `status.reconcile` decide, and writes."""
