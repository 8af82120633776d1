"""What the operator tells Prometheus about the jobs and about itself."""
