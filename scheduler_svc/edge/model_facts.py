"""What an edge knows of the served model: the model folder's card and what the attached workers told the core."""

from dataclasses import dataclass

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.service.model_files import ModelCard
from protos.wire.enums import HiddenMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Replaced as a whole whenever the core says something new."""

    card: ModelCard
    has_chat_template: bool
    context_tokens: int
    """The smaller of the model's and the workers'."""
    capacity_tokens: int
    """Tokens of one sequence that the largest KV pool can ever hold; the context until a worker was attached."""
    logits_width: int
    """Every token id a request may name is below this. The vocabulary's size until a worker was attached."""
    max_logprobs: int
    max_hidden_states: int
    """Most hidden states of one prompt."""
    max_hidden_mode: HiddenMode
    """Highest that the workers give; what callers may ask for is a setting."""
    max_waiting_requests: int
    """Most streams that wait at once; 0: not known."""
    max_waiting_tokens: int
    """Most tokens of their prompts; 0: not known."""
    dtype: str
    numerics: str
    is_serving: bool
    """A worker is attached now."""

    def told(self, core: CoreModel) -> "ModelFacts":
        """After the core's last word."""
        return model_facts(self.card, core, has_chat_template=self.has_chat_template)


def model_facts(card: ModelCard, core: CoreModel, *, has_chat_template: bool) -> ModelFacts:
    """The facts after the core's last word; an empty one before it said anything."""
    return ModelFacts(
        card=card,
        has_chat_template=has_chat_template,
        context_tokens=min(card.context_tokens, core.context_tokens or card.context_tokens),
        capacity_tokens=core.capacity_tokens or card.context_tokens,
        logits_width=core.logits_width or card.vocab_size,
        max_logprobs=core.max_logprobs,
        max_hidden_states=core.max_hidden_states,
        max_hidden_mode=HiddenMode(core.max_hidden_mode or HiddenMode.NULL),
        max_waiting_requests=core.max_waiting_requests,
        max_waiting_tokens=core.max_waiting_tokens,
        dtype=core.dtype,
        numerics=core.numerics,
        is_serving=core.serving,
    )
