"""Ways to capture a forward. They know no phase, bucket or padding."""
