"""Slow, obvious references of the native operators: the oracle of their tests."""
