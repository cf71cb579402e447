"""S4, S10: a share of the fuzzing in every run, from kept inputs on; and the driver finds what is there."""

import random

import pytest

from protos.forwardplane.v1.generate_pb2 import GenerateOnceRequest
from protos.wire.codec import checksum
from tests.fuzz.driver import CORPUS, Fuzzing, kept_inputs
from tests.fuzz.mutation import changed_bytes, changed_json, changed_message
from tests.fuzz.targets import TARGETS, Target, sealed

EXECUTIONS = {"tokenizer": 200}
FEWEST_OUTCOMES = {"tokenizer": 2, "ticket": 3, "attach": 3}


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_refused_or_taken_and_nothing_else(name):
    fuzzing = Fuzzing(name, seed=1)
    fuzzing.run(EXECUTIONS.get(name, 1500))
    found = fuzzing.findings
    assert found.failed == [], found.failed[0][1]
    assert any(outcome.startswith(("taken", "ResetExecutor")) for outcome in found.outcomes)
    assert len(found.outcomes) >= FEWEST_OUTCOMES.get(name, 10)


def test_a_failure_is_kept_with_its_input():
    def run(data: bytes) -> str:
        if data.startswith(b"ab!"):
            raise IndexError
        return str(len(data) % 3) + str(data.startswith(b"ab"))

    target = Target(seeds=[b"ab "], change=changed_bytes, run=run)
    fuzzing = Fuzzing("planted", target=target)
    fuzzing.run(20_000)
    assert fuzzing.findings.failed
    assert all(data.startswith(b"ab!") and "IndexError" in told for data, told in fuzzing.findings.failed)


@pytest.mark.parametrize("name", ["plan", "result"])
def test_half_of_the_seals_are_right(name):
    fuzzing = Fuzzing(name)
    rights = 0
    for _ in range(300):
        body, said = sealed(fuzzing.changed())
        rights += checksum(body) == said
    assert 100 < rights < 300


@pytest.mark.parametrize("change", [changed_bytes, changed_json])
def test_the_same_random_numbers_make_the_same_change(change):
    made = [change(b'{"a": [1, 2]}', random.Random(seed)) for seed in (1, 1, 2, 3, 4, 5)]
    assert made[0] == made[1]
    assert len(set(made)) > 1


def test_messages_stay_messages():
    target = TARGETS["caller"]
    rng = random.Random(3)
    for _ in range(200):
        GenerateOnceRequest.FromString(changed_message(target.seeds[0], GenerateOnceRequest, rng))


def test_kept_inputs_are_of_a_target():
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
    assert sum(len(kept_inputs(name)) for name in TARGETS) > 50
