"""Builds a model folder beside a GGUF file's own metadata: tokenizer, chat template, card and notice.

Knows nothing of where the file comes from. Guards: a folder appears under its name complete or not at all.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from protos.client.gguf_tokenizer import tokenizer_json
from protos.service.gguf_header import GgufHeader, Value, read_gguf_header, shown
from protos.service.model_files import (
    CARD_FILE,
    NOTICE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    GenerationDefaults,
    ModelCard,
    ModelFolder,
    encode_card,
    read_model_folder,
)
from protos.service.model_tensors import EMBEDDING
from protos.wire.errors import InvalidModelFile, UnavailableError

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_STARTS_WITH_BOS = frozenset({"llama-bpe"})
"""Pre-tokenizers whose prompts begin with the first token even when the file does not say so."""


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` when the block ends without an error.

    Raises:
        UnavailableError: the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UnavailableError(f"the model cache cannot be written: {error.strerror}", field="model_cache") from error
    try:
        yield staging
        if target.is_dir():
            shutil.rmtree(target)
        staging.chmod(0o755)
        staging.rename(target)
    except OSError as error:
        raise UnavailableError(f"the model cache cannot be written: {error.strerror}", field="model_cache") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_folder(folder: Path, *, name: str, notice: str, progress: Callable[[str], None]) -> None:
    """Write everything else of a model folder that holds `model.gguf` already.

    Raises:
        InvalidModelFile, UnsupportedFeature: the weight file's metadata cannot be used.
    """
    progress("reading the weight file's header")
    weights = folder / WEIGHTS_FILE
    header = read_gguf_header(weights)
    progress("writing the tokenizer")
    tokenizer = tokenizer_json(header.metadata)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    (folder / NOTICE_FILE).write_text(notice, encoding="utf-8")
    progress("computing the weights' fingerprint")
    with weights.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    card = model_card(header, name=name, weights_fingerprint=fingerprint, tokenizer=tokenizer)
    (folder / CARD_FILE).write_bytes(encode_card(card))


def model_card(header: GgufHeader, *, name: str, weights_fingerprint: str, tokenizer: bytes) -> ModelCard:
    """What a GGUF header says that a scheduler must know.

    Raises:
        InvalidModelFile: a key is missing or out of bounds.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidModelFile("general.architecture is missing or no text", field="general.architecture")
    if EMBEDDING not in header.tensors:
        raise InvalidModelFile(f"tensor {EMBEDDING!r} is missing", field=EMBEDDING)
    vocab_size = header.tensors[EMBEDDING].shape[0]
    context_tokens = _integer(metadata, f"{architecture}.context_length", limit=1 << 31)
    if context_tokens is None or context_tokens < 1:
        raise InvalidModelFile("the weights do not say their context length", field=f"{architecture}.context_length")
    bos = _token_id(metadata, "bos_token_id", vocab_size)
    ends = [_token_id(metadata, key, vocab_size) for key in _END_KEYS]
    default_bos = (
        metadata.get("tokenizer.ggml.pre") in _STARTS_WITH_BOS or metadata.get("tokenizer.ggml.model") == "llama"
    )
    return ModelCard(
        name=name,
        architecture=architecture,
        context_tokens=context_tokens,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=bos is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)),
        generation=_generation_defaults(metadata),
        weights_fingerprint=weights_fingerprint,
        tokenizer_fingerprint=hashlib.sha256(tokenizer).hexdigest(),
    )


def complete_folder(path: Path) -> ModelFolder | None:
    """The folder at `path` if it is there and complete."""
    if not path.is_dir():
        return None
    try:
        return read_model_folder(path)
    except InvalidModelFile:
        return None


def with_generation(folder: ModelFolder, generation: GenerationDefaults | None) -> ModelFolder:
    """The folder with these sampling defaults in its card; as it is when there are none, or when it has them."""
    if generation is None or generation == folder.card.generation:
        return folder
    card = replace(folder.card, generation=generation)
    with tempfile.NamedTemporaryFile(dir=folder.path, delete=False) as file:
        file.write(encode_card(card))
    written = Path(file.name)
    written.chmod(0o644)
    written.replace(folder.path / CARD_FILE)
    return replace(folder, card=card)


def _integer(metadata: Mapping[str, Value], key: str, *, limit: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise InvalidModelFile(f"{key} is {shown(value)}, must be an integer from 0 to {limit - 1}", field=key)
    return value


def _token_id(metadata: Mapping[str, Value], key: str, vocab_size: int) -> int | None:
    return _integer(metadata, f"tokenizer.ggml.{key}", limit=vocab_size)


def _generation_defaults(metadata: Mapping[str, Value]) -> GenerationDefaults:
    def number(key: str) -> float | None:
        name = f"general.sampling.{key}"
        value = metadata.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise InvalidModelFile(f"{name} is {shown(value)}, must be a finite number", field=name)
        return float(value)

    return GenerationDefaults(
        temperature=number("temp"),
        top_p=number("top_p"),
        top_k=_integer(metadata, "general.sampling.top_k", limit=1 << 31),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
    )
