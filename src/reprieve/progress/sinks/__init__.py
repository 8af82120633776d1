"""Receivers of progress behind one Protocol, and the factory that chooses them."""
