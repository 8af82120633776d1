"""Tests on a real Kubernetes: `make test-cluster` runs them, `make test` does not collect them."""
