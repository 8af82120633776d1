"""The memory that bytes pass through between tensors and storage."""
