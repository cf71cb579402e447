"""The pure ordering protocol: attach, order, result cache, fencing."""
