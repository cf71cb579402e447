"""The layout of a model folder: which files it holds and what its card says.

The scheduler learns everything about a model from here and never opens tensors. Knows nothing of how a folder is made.
Guards: a folder that is read is complete, and no message holds more of a path than its last part.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from protos.service.first_problem import first_problem
from protos.wire.errors import InvalidModelFile

DEFAULT_MODEL_CACHE = Path("~/.cache/forwardplane/models")
"""Folder of fetched models, by name."""
WEIGHTS_FILE = "model.gguf"
WEIGHTS_FOLDER = "safetensors"
"""In place of the file: a folder, or a link to one, as model hubs lay it out."""
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
CARD_FILE = "model.json"
NOTICE_FILE = "NOTICE"
MAX_CARD_BYTES = 1 << 20
"""No real card is above a few kilobytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling the model's authors recommend. `None`: its files say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a scheduler must know of a model, as stored in `model.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    architecture: str
    """Of the weights, such as `llama`."""
    context_tokens: PositiveInt
    """Longest sequence the model can hold."""
    vocab_size: PositiveInt
    eos_token_ids: tuple[NonNegativeInt, ...]
    """Ids that end a sequence."""
    bos_token_id: NonNegativeInt | None = None
    add_bos: bool = False
    """The first id of a raw prompt is `bos_token_id`."""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    weights_fingerprint: str
    """SHA-256 of the weight file, hex."""
    tokenizer_fingerprint: str
    """SHA-256 of `tokenizer.json`, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A complete model folder. Its files exist; only the card has been read."""

    path: Path
    weights: Path
    """A GGUF file, or a folder with `config.json` and safetensors files."""
    tokenizer: Path
    chat_template: Path | None
    """`None`: a base model without one."""
    card: ModelCard


_CARD = TypeAdapter(ModelCard)


def read_model_folder(path: Path) -> ModelFolder:
    """The model folder at `path`.

    Raises:
        InvalidModelFile: not a folder, a file is missing, or the card is not valid; names the file or the card's field.
    """
    if not path.is_dir():
        raise InvalidModelFile(f"{path.name} is not a model folder", field="model")
    has_folder = (path / WEIGHTS_FOLDER).is_dir()
    if not has_folder and not (path / WEIGHTS_FILE).is_file():
        raise InvalidModelFile(f"model folder {path.name} has no {WEIGHTS_FILE}", field=WEIGHTS_FILE)
    for name in (CARD_FILE, TOKENIZER_FILE):
        if not (path / name).is_file():
            raise InvalidModelFile(f"model folder {path.name} has no {name}", field=name)
    template = path / TEMPLATE_FILE
    return ModelFolder(
        path=path,
        weights=path / (WEIGHTS_FOLDER if has_folder else WEIGHTS_FILE),
        tokenizer=path / TOKENIZER_FILE,
        chat_template=template if template.is_file() else None,
        card=_read_card(path / CARD_FILE),
    )


def _read_card(path: Path) -> ModelCard:
    try:
        size = path.stat().st_size
        if size > MAX_CARD_BYTES:
            raise InvalidModelFile(f"{CARD_FILE} has {size} bytes, limit {MAX_CARD_BYTES}", field=CARD_FILE)
        return _CARD.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise InvalidModelFile(f"{CARD_FILE} cannot be read: {error.strerror}", field=CARD_FILE) from error
    except ValidationError as error:
        name, text = first_problem(error)
        raise InvalidModelFile(f"{CARD_FILE}: {name}: {text}", field=name) from error


def encode_card(card: ModelCard) -> bytes:
    """The bytes of `model.json`."""
    return _CARD.dump_json(card, indent=2) + b"\n"
