"""The pure scheduling core."""
