"""The real models: found in the cache of models, or fetched into it once."""

import os
from functools import cache
from pathlib import Path

from protos.client.fetch_model import fetch_model
from protos.service.model_files import ModelFolder

SMOLLM2 = "smollm2-135m-instruct"
GEMMA3 = "gemma3-270m"


@cache
def model_folder(name: str = SMOLLM2) -> ModelFolder:
    """The model's folder; FORWARDPLANE_MODEL_CACHE names another cache than the default one."""
    chosen = os.environ.get("FORWARDPLANE_MODEL_CACHE")
    return fetch_model(name, cache=Path(chosen) if chosen else None)
