"""What a checkpoint of a Hugging Face trainer holds, and how it is caught on its way to the disk."""
