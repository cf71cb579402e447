"""Runs a recorded stream of plans again on a fresh executor and compares. A program of its own."""
