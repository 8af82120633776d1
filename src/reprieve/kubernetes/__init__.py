"""What Reprieve adds to Kubernetes: the settings of a TrainJob, its schema, and a client of the API server."""
