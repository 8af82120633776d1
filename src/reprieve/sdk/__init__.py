"""The Kubeflow SDK's trainer and client for preemptible training. Its public names are in `reprieve.kubeflow`."""
