"""Operators and their references."""
