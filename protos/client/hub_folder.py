"""Builds a model folder around a folder as model hubs lay it out: a link to it, its tokenizer, template and card.

Guards: what the card says was checked against the files; the user's folder is only read.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

from protos.service.gguf_header import shown
from protos.service.model_files import (
    CARD_FILE,
    NOTICE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FOLDER,
    GenerationDefaults,
    ModelCard,
    encode_card,
)
from protos.service.safetensors_folder import (
    SafetensorsFolder,
    folder_fingerprint,
    read_json_object,
    read_safetensors_folder,
)
from protos.wire.errors import InvalidModelFile

_TOKENIZER_CONFIG, _GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
_MAX_CONTEXT, _MAX_VOCABULARY = 1 << 31, 1 << 31
_KINDS: Mapping[type | UnionType, str] = MappingProxyType(
    {bool: "true or false", int: "a whole number", int | float: "a number", str | list: "a text or a list"}
)
_GENERATION = ("temperature", "top_p", "min_p", "repetition_penalty")


def write_hub_folder(folder: Path, source: Path, *, name: str, notice: str, progress: Callable[[str], None]) -> None:
    """Write a whole model folder around `source`.

    Raises:
        InvalidModelFile: `source` is not complete, or its files contradict each other; names file and field.
    """
    progress("reading the headers of the weights")
    found = read_safetensors_folder(source)
    (folder / WEIGHTS_FOLDER).symlink_to(source, target_is_directory=True)
    tokenizer = _tokenizer(source)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    texts = _optional(source, _TOKENIZER_CONFIG)
    template = _chat_template(source, texts)
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    (folder / NOTICE_FILE).write_text(notice, encoding="utf-8")
    progress("computing the weights' fingerprint")
    card = _card(found, name=name, tokenizer=tokenizer, texts=texts)
    (folder / CARD_FILE).write_bytes(encode_card(card))


def _card(found: SafetensorsFolder, *, name: str, tokenizer: bytes, texts: Mapping[str, Any]) -> ModelCard:
    config = found.config
    vocab_size = _integer(config, "vocab_size", _MAX_VOCABULARY)
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or len(architecture) > 64:
        raise InvalidModelFile(f"config.json: model_type is {shown(architecture)}, must be a name", field="model_type")
    generation = _optional(found.path, _GENERATION_CONFIG)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    begin = _token_ids(config.get("bos_token_id"), "bos_token_id", vocab_size)
    return ModelCard(
        name=name,
        architecture=architecture,
        context_tokens=_integer(config, "max_position_embeddings", _MAX_CONTEXT),
        vocab_size=vocab_size,
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=_token_ids(ends, "eos_token_id", vocab_size),
        add_bos=bool(begin) and _adds_bos(texts, tokenizer, begin[0]),
        generation=_generation_defaults(generation),
        weights_fingerprint=folder_fingerprint(found.path),
        tokenizer_fingerprint=hashlib.sha256(tokenizer).hexdigest(),
    )


def _tokenizer(source: Path) -> bytes:
    path = source / TOKENIZER_FILE
    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            message = f"{TOKENIZER_FILE} has {size} bytes, limit {MAX_TOKENIZER_BYTES}"
            raise InvalidModelFile(message, field=TOKENIZER_FILE)
        return path.read_bytes()
    except OSError as error:
        raise InvalidModelFile(f"{TOKENIZER_FILE} cannot be read: {error.strerror}", field=TOKENIZER_FILE) from error


def _chat_template(source: Path, texts: Mapping[str, Any]) -> str | None:
    path = source / TEMPLATE_FILE
    if not path.is_file():
        return _chosen_template(_of_kind(texts, "chat_template", _TOKENIZER_CONFIG, str | list))
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise InvalidModelFile(f"{TEMPLATE_FILE} is above {MAX_TEMPLATE_BYTES} bytes", field=TEMPLATE_FILE)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModelFile(f"{TEMPLATE_FILE} cannot be read as UTF-8", field=TEMPLATE_FILE) from error


def _chosen_template(given: str | list[Any] | None) -> str | None:
    """The template itself, or that named `default` where there are several."""
    if not isinstance(given, list):
        return given
    named = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
    chosen = named.get("default")
    if not isinstance(chosen, str):
        message = f"{_TOKENIZER_CONFIG}: chat_template has no template named 'default'"
        raise InvalidModelFile(message, field="chat_template")
    return chosen


def _adds_bos(texts: Mapping[str, Any], tokenizer: bytes, bos_token_id: int) -> bool:
    """What the tokenizer's settings say; else whether its own post-processor puts the token in front."""
    said = _of_kind(texts, "add_bos_token", _TOKENIZER_CONFIG, bool)
    if said is not None:
        return bool(said)
    try:
        layout = json.loads(tokenizer)
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{TOKENIZER_FILE} is no JSON that can be read", field=TOKENIZER_FILE) from error
    return _begins_with(layout.get("post_processor") if isinstance(layout, dict) else None, bos_token_id)


def _begins_with(processor: Any, token_id: int) -> bool:
    """Whether a post-processor's template for one text begins with the token."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence" and isinstance(processor.get("processors"), list):
        return any(_begins_with(part, token_id) for part in processor["processors"])
    template, tokens = processor.get("single"), processor.get("special_tokens")
    if not isinstance(template, list) or not template or not isinstance(tokens, dict):
        return False
    first = template[0].get("SpecialToken") if isinstance(template[0], dict) else None
    known = tokens.get(first.get("id")) if isinstance(first, dict) else None
    return isinstance(known, dict) and known.get("ids") == [token_id]


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """How a folder wants its model to be sampled. Ranges are checked where those of callers are.

    Raises:
        InvalidModelFile: a value is of another kind than its key.
    """
    sampled = _of_kind(generation, "do_sample", _GENERATION_CONFIG, bool)
    numbers = {name: _of_kind(generation, name, _GENERATION_CONFIG, int | float) for name in _GENERATION}
    top_k = _of_kind(generation, "top_k", _GENERATION_CONFIG, int)
    if top_k is not None and not 0 <= top_k < 1 << 31:
        message = f"{_GENERATION_CONFIG}: top_k is {shown(top_k)}, must be 0 to {(1 << 31) - 1}"
        raise InvalidModelFile(message, field="top_k")
    if sampled is False:
        return GenerationDefaults(temperature=0.0)
    known = {name: float(value) for name, value in numbers.items() if value is not None}
    return GenerationDefaults(top_k=top_k, **known)


def _of_kind(found: Mapping[str, Any], key: str, file: str, kind: type | UnionType) -> Any:
    """The value, if it is of that kind; None if there is none."""
    value = found.get(key)
    is_flag = isinstance(value, bool)
    if value is None or (isinstance(value, kind) and (is_flag == (kind is bool))):
        return value
    raise InvalidModelFile(f"{file}: {key} is {shown(value)}, must be {_KINDS[kind]}", field=key)


def _integer(config: Mapping[str, Any], key: str, limit: int) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < limit:
        raise InvalidModelFile(f"config.json: {key} is {shown(value)}, must be 1 to {limit - 1}", field=key)
    return value


def _token_ids(value: Any, key: str, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token_id) is not int or not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidModelFile(f"{key} is {shown(value)}, must be ids from 0 to {vocab_size - 1}", field=key)
    return tuple(dict.fromkeys(ids))


def _optional(source: Path, name: str) -> dict[str, Any]:
    return read_json_object(source / name) if (source / name).is_file() else {}
