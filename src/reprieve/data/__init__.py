"""Positions in data: a resumed run sees the very batches that an undisturbed run would see."""
