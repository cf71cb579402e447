"""Page accounting of worker memory, pure."""
