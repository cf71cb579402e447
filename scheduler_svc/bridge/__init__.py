"""Messages between edge and core processes."""
