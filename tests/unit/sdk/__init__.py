"""Of the Kubeflow SDK: trainer, client, bootstrap."""
