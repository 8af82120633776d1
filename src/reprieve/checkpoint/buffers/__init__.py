"""Host memory, threads and CUDA streams that bytes pass through between tensors and storage."""
