"""The worker's gRPC servicer."""
