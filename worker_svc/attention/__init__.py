"""Attention back-ends."""
