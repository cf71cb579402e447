"""Plan streams to workers."""
