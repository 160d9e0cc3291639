"""What a person runs: `python -m scripts.NAME --help`."""
