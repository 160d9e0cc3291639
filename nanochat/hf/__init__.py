"""A model as the Hugging Face tools read it; scripts/export.py writes the folder."""
