"""What callers import: GenerationClient and the forwardplane command."""
