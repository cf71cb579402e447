"""Model folders around the small models of `hub_models.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protos.client.fetch_model import prepare_folder
from protos.service.model_files import ModelFolder
from tests.support.hub_models import config_of, make_tensors, write_hub
from tests.support.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def hub_folder(path: Path, case: str) -> ModelFolder:
    """The model folder of a case, made below `path`."""
    config = config_of(case)
    return hub_folder_of(path, config, make_tensors(config))


def hub_folder_of(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> ModelFolder:
    source = write_hub(path / "hub", config, tensors)
    write_tokenizer(source, byte_level_tokenizer())
    return prepare_folder(source, cache=path / "cache")
