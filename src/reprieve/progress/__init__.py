"""The progress of a run: tracked on the training thread, published to sinks."""
