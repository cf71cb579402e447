"""The meaning of the schema: frozen NumPy types, codec, validation, limits, errors. No grpc."""
