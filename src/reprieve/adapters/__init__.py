"""One adapter for each way of writing a training loop: plain PyTorch, Hugging Face trainers, DCP."""
