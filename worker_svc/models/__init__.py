"""Model families and weights."""
