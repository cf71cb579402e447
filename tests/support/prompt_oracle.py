"""What a request must be told of its prompt by the fake worker, computed without plans, pages or chunks."""

from scheduler_svc.core.events import PromptAnswered, RequestSpec, StateUse
from tests.support.fake_inputs import input_best, input_logprob, input_state
from tests.support.fake_worker import tag_after


def assert_prompt_answer(spec: RequestSpec, answer: PromptAnswered) -> None:
    wants, ids = spec.prompt_wants, spec.prompt_ids.tolist()
    tags: list[int] = []
    for position, token_id in enumerate(ids):
        tags.append(tag_after(tags[-1] if tags else 0, token_id, position))
    if wants.logprobs_from is None:
        assert answer.logprobs is None
    else:
        positions = range(wants.logprobs_from, len(ids))
        best = [input_best(tags[at - 1], wants.top_logprobs) for at in positions]
        assert answer.logprobs.first_pos == wants.logprobs_from
        assert answer.logprobs.values.tolist() == [input_logprob(tags[at - 1], ids[at]) for at in positions]
        assert answer.logprobs.top_ids.tolist() == best
        assert answer.logprobs.top_values.tolist() == [
            [input_logprob(tags[at - 1], token) for token in tokens] for at, tokens in zip(positions, best, strict=True)
        ]
    if wants.states is None:
        assert answer.states is None
        return
    states = [input_state(tag) for tag in tags]
    if wants.states is StateUse.MEAN:
        sums = [sum(column) for column in zip(*states, strict=True)]
        expected = [[value / len(ids) for value in sums]]
        assert abs(answer.states.states - expected).max() < 1e-3
    else:
        assert answer.states.states.tolist() == (states if wants.states is StateUse.FULL else states[-1:])
    assert answer.states.first_pos == (len(ids) - 1 if wants.states is StateUse.LAST else 0)
