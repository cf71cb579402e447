"""What settings ask of attention. Knows no torch: asked before it is loaded, and again when the model is known."""

from worker_svc.attention.choice import AttentionRequest
from worker_svc.runners.executor_settings import ExecutorSettings

_REPRODUCIBLE = "reproducible"
"""`numerics.ReproducibleNumerics.name`, which cannot be had without torch."""


def attention_request(settings: ExecutorSettings, *, head_dim: int | None = None) -> AttentionRequest:
    """Of these settings; `head_dim`: of the model, None if it is not known yet."""
    return AttentionRequest(
        prefill=settings.prefill_attention,
        decode=settings.decode_attention,
        reproducible=settings.numerics == _REPRODUCIBLE,
        plain=settings.kernels == "torch",
        device=settings.device.partition(":")[0],  # without the number that torch allows behind it
        dtype=settings.dtype,
        page_size=settings.page_size,
        head_dim=head_dim,
    )
