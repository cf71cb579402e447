import numpy as np
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters, StopParameters
from protos.service.model_files import GenerationDefaults
from protos.wire.errors import InvalidModelFile
from scheduler_svc.edge.model_facts import model_facts
from scheduler_svc.edge.resolve_request import check_generation_defaults, resolve_request, silent_ids
from tests.support.edge_harness import tiny_card


def resolve(request: pb.GenerateRequest, *, capacity_tokens: int = 0, **defaults: float):
    card = tiny_card(7, generation=GenerationDefaults(**defaults))
    core = CoreModel(context_tokens=50, capacity_tokens=capacity_tokens, logits_width=300)
    facts = model_facts(card, core, has_chat_template=False)
    return resolve_request(request, [1, 2], facts=facts, seed=11, deadline_ms=5)


def test_neutral_values_where_nobody_says_anything() -> None:
    sampling = resolve(pb.GenerateRequest()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1, 0, 0)
    assert sampling.seed == 11


def test_the_models_own_settings_hold_until_the_caller_says_otherwise() -> None:
    own = {"temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5}
    sampling = resolve(pb.GenerateRequest(), **own).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 40, 0.125)
    assert sampling.repetition_penalty == 1.5

    asked = SamplingParameters(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    sampling = resolve(pb.GenerateRequest(sampling=asked), **own).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)


def test_lengths_and_stops() -> None:
    request = pb.GenerateRequest(stop=StopParameters(min_tokens=3, stop_token_ids=[9, 7, 9]), logprobs=0)
    submit = resolve(request)
    assert (submit.max_tokens, submit.min_tokens, submit.deadline_ms) == (48, 3, 5)
    assert np.frombuffer(submit.prompt_ids, "<i4").tolist() == [1, 2]
    assert np.frombuffer(submit.stop_token_ids, "<u4").tolist() == [7, 9]
    assert (submit.output_logprobs, submit.top_logprobs) == (True, 0)
    assert not resolve(pb.GenerateRequest()).output_logprobs


def test_rules_are_sorted_columns() -> None:
    asked = SamplingParameters(
        logit_bias={9: -1.5, 3: 100}, allowed_token_ids=[8, 2, 8], banned_token_ids=[5], frequency_penalty=0.5
    )
    sampling = resolve(pb.GenerateRequest(sampling=asked)).sampling
    assert np.frombuffer(sampling.bias_ids, "<u4").tolist() == [3, 9]
    assert np.frombuffer(sampling.bias_values, "<f4").tolist() == [100, -1.5]
    assert np.frombuffer(sampling.allowed_ids, "<u4").tolist() == [2, 8]
    assert np.frombuffer(sampling.banned_ids, "<u4").tolist() == [5]
    assert (sampling.frequency_penalty, sampling.sample_index) == (0.5, 0)
    nothing = resolve(pb.GenerateRequest())
    assert (nothing.sampling.bias_ids, nothing.sampling.allowed_ids, nothing.HasField("grammar")) == (b"", b"", False)


def test_grammars_are_a_kind_and_a_text() -> None:
    def grammar(**fields: object) -> tuple[str, str]:
        message = resolve(pb.GenerateRequest(**fields)).grammar
        return message.kind, message.source

    assert grammar(json_schema="{}") == ("json_schema", "{}")
    assert grammar(regex="a+") == ("regex", "a+")
    assert grammar(ebnf="start: x") == ("ebnf", "start: x")
    assert grammar(choice=pb.ChoiceList(texts=["yes", 'n"o'])) == ("choice", '["yes", "n\\"o"]')


def test_without_max_tokens_a_request_asks_for_what_a_small_pool_can_hold() -> None:
    assert resolve(pb.GenerateRequest(), capacity_tokens=32).max_tokens == 30
    assert resolve(pb.GenerateRequest(), capacity_tokens=2).max_tokens == 1
    asked = pb.GenerateRequest(stop=StopParameters(max_tokens=40))
    assert resolve(asked, capacity_tokens=32).max_tokens == 40


def test_who_ignores_the_end_of_sequence_sees_its_text() -> None:
    facts = model_facts(tiny_card(7), CoreModel(), has_chat_template=False)
    assert silent_ids(pb.GenerateRequest(), facts) == {7}
    ignoring = pb.GenerateRequest(stop=StopParameters(ignore_eos=True))
    assert silent_ids(ignoring, facts) == frozenset()
    assert resolve(ignoring).stop_token_ids == b""


def test_a_model_whose_own_settings_make_no_sense_is_refused() -> None:
    check_generation_defaults(tiny_card(7, generation=GenerationDefaults(temperature=0.6, top_k=64)))
    with pytest.raises(InvalidModelFile, match=r"generation: top_p is 0; allowed: \[1.17549e-38, 1\]"):
        check_generation_defaults(tiny_card(7, generation=GenerationDefaults(top_p=0.0)))
