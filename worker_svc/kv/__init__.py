"""KV pools and index translation."""
