"""Execution paths around ModelRunner."""
