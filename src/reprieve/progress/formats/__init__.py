"""Formats of progress: JSON and Prometheus text."""
