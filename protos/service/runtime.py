"""What of the libraries under us must hold before a service starts, since a service without it is not safe."""

from google.protobuf.internal import api_implementation

from protos.wire.errors import UnsafeRuntime

SAFE_BACKEND = "upb"


def assert_protobuf_backend(backend: str | None = None) -> None:
    """Make sure that messages are parsed by the C back-end, which bounds nesting (CVE-2025-4565).

    Args:
        backend: name of the one that is loaded; None: ask.

    Raises:
        UnsafeRuntime: it is another one.
    """
    found = backend or api_implementation.Type()
    if found != SAFE_BACKEND:
        message = f"protobuf runs on its back-end {found!r}; only {SAFE_BACKEND} is safe with messages of strangers"
        raise UnsafeRuntime(f"{message}: unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
