"""Device readings."""
