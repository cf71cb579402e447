"""What an edge knows of the served model: the model folder's card and what the attached workers told the core."""

from dataclasses import dataclass, field

from protos.forwardplane.v1.bridge_pb2 import CoreModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The model's own generation settings; neutral values where its files say nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCardFacts:
    """What the model folder says. Made once at start."""

    name: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Both together. Replaced as a whole whenever the core says something new."""

    card: ModelCardFacts
    context_tokens: int
    """The smaller of the model's and the workers'."""
    logits_width: int
    """Every token id a request may name is below this. The vocabulary's size until a worker was attached."""
    max_logprobs: int
    dtype: str
    numerics: str
    is_serving: bool
    """A worker is attached now."""


def without_core(card: ModelCardFacts) -> ModelFacts:
    """Before the core said anything."""
    return model_facts(card, CoreModel())


def model_facts(card: ModelCardFacts, core: CoreModel) -> ModelFacts:
    """The facts after the core's last word."""
    return ModelFacts(
        card=card,
        context_tokens=min(card.context_tokens, core.context_tokens or card.context_tokens),
        logits_width=core.logits_width or card.vocab_size,
        max_logprobs=core.max_logprobs,
        dtype=core.dtype,
        numerics=core.numerics,
        is_serving=core.serving,
    )
