"""The worker service: weights, KV pools, execution; no per-request state."""
