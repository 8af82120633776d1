"""How a Hugging Face trainer saves: its own code decides on the files, and Reprieve intercepts and writes them."""
