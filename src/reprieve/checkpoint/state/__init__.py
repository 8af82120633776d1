"""What is saved: the named objects of a training state, and their fingerprints."""
