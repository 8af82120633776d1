"""How a Hugging Face trainer resumes: position, strict loading, trainer state, data."""
