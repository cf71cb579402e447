"""The scheduler service: every bit of per-request state."""
