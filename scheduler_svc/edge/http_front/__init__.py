"""The OpenAI-compatible HTTP front: a second door to the same streams as the gRPC one."""
