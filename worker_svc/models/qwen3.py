"""The Qwen3 family: Llama's wiring with norms of the heads and no biases.

Knows nothing of files, batches or pools. Guards: its parameter table names everything that the layers read.
"""

from worker_svc.models.decoder_parts import decoder_table, head_norm_shapes, layer_shapes
from worker_svc.models.model_config import ModelConfig
from worker_svc.models.weights import ParameterSpec


def parameter_table(config: ModelConfig) -> list[ParameterSpec]:
    """Every tensor this family reads, with its shape."""
    return decoder_table(config, layer_shapes(config) | head_norm_shapes(config))
