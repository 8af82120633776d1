"""The worker processes of a DataLoader: what they ignore, how they end, and the state that they report."""
