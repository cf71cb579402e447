"""The callers' gRPC server."""
