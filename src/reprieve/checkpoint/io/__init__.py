"""Bytes to storage and back: who writes which pages, the writer, the verifying reader."""
