"""Random lives in which requests also ask about their prompts: every answer is the undisturbed one, and comes once."""

from collections import Counter
from dataclasses import replace

from protos.wire.enums import Feature, FinishReason, HiddenMode
from scheduler_svc.core.events import PromptWants, RequestRefused, StateUse
from tests.property.test_core_simulation import Life
from tests.support.core_harness import oracle
from tests.support.prompt_oracle import assert_prompt_answer

SEEDS = 30
TURNS = 80
FAULTS = ("retractions", "migrations", "failed_rows", "rejected_plans", "late_rows")


class AskingLife(Life):
    def _info(self):
        made = super()._info()
        page_size = made.sub_pools[0].page_size
        return replace(
            made,
            features=made.features | {Feature.PROMPT_LOGPROBS, Feature.HIDDEN_STATES},
            max_hidden_mode=HiddenMode.FULL,
            limits=replace(made.limits, max_hidden_states=self.random.choice([max(page_size, 32), 1000])),
        )

    def spec(self):
        made = super().spec()
        if self.random.random() < 0.3:
            return made
        wants = PromptWants(
            logprobs_from=self.random.choice([None, 1, self.random.randint(1, len(made.prompt_ids))]),
            top_logprobs=self.random.choice([0, 3]),
            states=self.random.choice([None, None, *StateUse]),
        )
        ends = self.random.random() < 0.3 and made.grammar is None
        return replace(made, prompt_wants=wants, max_tokens=0 if ends else made.max_tokens)


def check_answers(life, seen):
    harness = life.harness
    harness.assert_balanced()
    for stream, spec in harness.specs.items():
        end, answer = harness.ends[stream], harness.prompts.get(stream)
        if isinstance(end, RequestRefused):
            assert answer is None
            continue
        got = harness.outputs.get(stream, [])
        assert got == oracle(life.info, spec)[: len(got)]
        if spec.prompt_wants is None:
            assert answer is None
            continue
        assert answer is not None or not (got or end.reason is FinishReason.LENGTH)
        if answer is not None:
            assert_prompt_answer(spec, answer)
            seen[spec.prompt_wants.states] += 1
            seen["prefill only"] += spec.max_tokens == 0
            seen["scored"] += spec.prompt_wants.logprobs_from is not None


def test_every_prompt_is_answered_once_and_as_in_an_undisturbed_run():
    faults, seen = Counter(), Counter()
    for seed in range(SEEDS):
        try:
            life = AskingLife(seed)
            for _ in range(TURNS):
                life.turn()
            life.settle()
            check_answers(life, seen)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        faults.update({name: getattr(life.harness.state.counters, name) for name in FAULTS})
    assert all(faults[name] >= 10 for name in FAULTS), faults
    assert all(seen[name] >= 10 for name in (*StateUse, "prefill only", "scored")), seen
