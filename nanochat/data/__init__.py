"""Text to shards to tokens to batches, with an exact position in the data (docs/data.md)."""
