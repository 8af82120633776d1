"""Tests of `reprieve.ray` on a real Ray, which `make test-ray` runs."""
