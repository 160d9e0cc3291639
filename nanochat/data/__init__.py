"""From text to batches: shards (parquet files), tokens, rows, and an exact position (docs/data.md)."""
