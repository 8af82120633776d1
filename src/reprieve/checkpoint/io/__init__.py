"""Bytes to storage and back: the partition among ranks, the writer, the verifying reader."""
