"""Plans as device batches."""
