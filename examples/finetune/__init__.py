"""Fine-tuning without a download: `make_tiny.py` makes models and data, `reprieve finetune` trains with them."""
