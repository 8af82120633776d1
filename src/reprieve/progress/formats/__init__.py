"""Progress in the formats that others read: JSON and Prometheus text."""
