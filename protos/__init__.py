"""The contract package: schema, its meaning, the shell that speaks it, and what callers import."""
