"""Of the Kubeflow SDK, with real processes."""
