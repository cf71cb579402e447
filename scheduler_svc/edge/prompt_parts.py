"""What the core says of a prompt, cut into parts of which each fits a caller's message with room for what goes with it.

Pure. Guards: every position is in one part, in order; hidden states may fill a message, so theirs is a part of its own.
"""

from dataclasses import dataclass, field

from protos.forwardplane.v1.bridge_pb2 import PromptAnswer
from protos.forwardplane.v1.generate_pb2 import GenerateChunk, HiddenStates
from protos.forwardplane.v1.sampling_pb2 import TokenLogprob
from scheduler_svc.bridge.convert_prompts import prompt_logprobs

POSITIONS_A_PART = 1024
"""At most 20 alternatives of about 11 bytes each: a quarter of a megabyte."""


@dataclass(slots=True, eq=False)
class PromptPart:
    """One part; lives until its chunk is made."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_pos: int = 0
    states: HiddenStates | None = None

    def chunk(self, sample_index: int) -> GenerateChunk:
        """The part as a chunk without output."""
        return GenerateChunk(
            sample_index=sample_index,
            prompt_logprobs=self.logprobs,
            prompt_first_pos=self.first_pos,
            hidden_states=self.states,
        )


def prompt_parts(answer: PromptAnswer, *, begins_alone: bool) -> list[PromptPart]:
    """The parts, in order; at least one. `begins_alone`: the first has no hidden states, other things go with it."""
    parts: list[PromptPart] = []
    if answer.HasField("logprobs"):
        items, first_pos = prompt_logprobs(answer.logprobs), answer.logprobs.first_pos
        for begin in range(0, len(items), POSITIONS_A_PART):
            parts.append(PromptPart(items[begin : begin + POSITIONS_A_PART], first_pos + begin))
    if not parts and (begins_alone or not answer.HasField("states")):
        parts.append(PromptPart())
    if answer.HasField("states"):
        parts.append(PromptPart(states=answer.states))
    return parts
