"""What tests on a cluster are written with: the cluster itself, a watch over pods, builders of objects."""
