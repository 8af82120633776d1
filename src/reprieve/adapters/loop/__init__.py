"""The plain PyTorch loop: `reprieve.Run`."""
