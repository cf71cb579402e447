"""What the weights of a model are, from their headers alone: refused before a tensor is read, a process started.

Reads a GGUF file, or a folder of safetensors files. Guards: what is described can be computed by the worker: a known
architecture, no property without code, all tensors there in the right shapes and none too many; a message names file,
field and value.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from protos.service.gguf_header import GgufHeader, read_gguf_header, said, shown
from protos.service.hub_config import hub_model_config, hub_tensors
from protos.service.model_config import ModelBiases, ModelConfig, read_model_config
from protos.service.model_files import CARD_FILE, ModelFolder, read_model_folder
from protos.service.model_tensors import EMBEDDING, FAMILY_SHAPES, chosen_tensors, parameter_table
from protos.service.safetensors_folder import (
    CONFIG_FILE,
    StoredTensor,
    is_safetensors_folder,
    read_safetensors_folder,
)
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

_UNREAD_SUFFIX = ".attn_rot_embd.weight"
"""Of buffers that old files hold and no model reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedWeights:
    """Checked; no tensor has been read."""

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    """One for each parameter that is there, by its GGUF name."""
    header: GgufHeader | None
    """Of a GGUF file."""


def describe_weights(weights: Path) -> DescribedWeights:
    """What the GGUF file or hub folder at `weights` holds.

    Raises:
        InvalidModelFile: damaged, or not complete.
        UnsupportedFeature: no worker computes such a model.
    """
    if weights.is_dir():
        return _described_folder(weights)
    header = read_gguf_header(weights)
    with _naming(weights.resolve().name):
        config = _gguf_config(header)
    stored = {
        name: StoredTensor(path=weights, entry=entry)
        for name, entry in header.tensors.items()
        if not name.endswith(_UNREAD_SUFFIX)
    }
    tensors = chosen_tensors(stored, parameter_table(config), of=weights.resolve().name)
    return DescribedWeights(config=config, tensors=tensors, header=header)


def described_folder(folder: ModelFolder) -> DescribedWeights:
    """What a model folder's weights are, which its card must agree with.

    Raises:
        InvalidModelFile: damaged, not complete, or of another model than the card.
        UnsupportedFeature: no worker computes such a model.
    """
    found = describe_weights(folder.weights)
    for name, here, there in (
        ("context_tokens", folder.card.context_tokens, found.config.context_tokens),
        ("vocab_size", folder.card.vocab_size, found.config.vocab_size),
    ):
        if here != there:
            message = f"{CARD_FILE}: {name} is {here}, the weights beside it have {there}: fetch the model anew"
            raise InvalidModelFile(message, field=name)
    return found


def is_hub_folder(path: Path) -> bool:
    """Whether `path` is a folder as model hubs have it, which a model folder can be derived from."""
    return is_safetensors_folder(path) and not (path / CARD_FILE).is_file()


def check_model(path: Path) -> None:
    """Refuse what no worker can serve: a model folder, a folder of a model hub, or a GGUF file.

    Raises:
        InvalidModelFile, UnsupportedFeature: why.
    """
    if path.is_dir() and not is_hub_folder(path):
        described_folder(read_model_folder(path))
    else:
        describe_weights(path)


def _described_folder(weights: Path) -> DescribedWeights:
    hub = read_safetensors_folder(weights)
    with _naming(CONFIG_FILE):
        config = hub_model_config(hub)
    table = parameter_table(config)
    tensors = chosen_tensors(hub_tensors(hub, config, table), table, of=weights.resolve().name)
    return DescribedWeights(config=config, tensors=tensors, header=None)


def _gguf_config(header: GgufHeader) -> ModelConfig:
    architecture = header.metadata.get("general.architecture")
    if architecture not in FAMILY_SHAPES:
        message = f"general.architecture {said(architecture)}, supported: {', '.join(FAMILY_SHAPES)}"
        raise UnsupportedFeature(message, field="general.architecture")
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise InvalidModelFile(f"tensor {EMBEDDING!r} is missing", field=f"tensor {EMBEDDING!r}")
    _check_vocabulary(header, f"{architecture}.vocab_size", rows=embedding.shape[0])
    config = read_model_config(header.metadata, vocab_size=embedding.shape[0])
    return replace(config, biases=_gguf_biases(header, config.architecture))


def _check_vocabulary(header: GgufHeader, key: str, *, rows: int) -> None:
    stated = header.metadata.get(key)
    if stated is not None and stated != rows:
        raise InvalidModelFile(f"{key} is {shown(stated)}, tensor {EMBEDDING!r} has {rows} rows", field=key)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, tuple) and len(tokens) > rows:
        message = f"tokenizer.ggml.tokens has {len(tokens)} tokens, tensor {EMBEDDING!r} has {rows} rows"
        raise InvalidModelFile(message, field="tokenizer.ggml.tokens")


def _gguf_biases(header: GgufHeader, architecture: str) -> ModelBiases:
    """A file says that there are some by holding them."""

    def has(part: str) -> bool:
        return f"blk.0.{part}.bias" in header.tensors

    return ModelBiases(qkv=architecture == "qwen2" or has("attn_q"), output=has("attn_output"), mlp=has("ffn_gate"))


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Errors that pass through say which file they are about."""
    try:
        yield
    except (InvalidModelFile, UnsupportedFeature) as error:
        raise type(error)(f"{file}: {error.message}", field=error.field) from error
