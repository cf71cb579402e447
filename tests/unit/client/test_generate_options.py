"""What a caller says, as options or on the command line, reaches the wire as it was meant."""

import json

import numpy as np
import pytest
from cyclopts import CycloptsError

from protos.client.command import app
from protos.client.exit_codes import WrongUsage
from protos.client.generate_command import AnswerArguments, GenerateArguments, answer, options_of
from protos.client.messages import GenerateOptions, chunk_from, generation_from
from protos.client.request_messages import generate_request
from protos.forwardplane.v1 import generate_pb2 as pb
from protos.wire.errors import InvalidRequest


def test_options_reach_the_request() -> None:
    options = GenerateOptions(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        n=3,
        logit_bias={5: -1.5},
        allowed_token_ids=(5, 6),
        banned_token_ids=(7,),
        regex="a+",
    )
    request = generate_request("x", options)
    sampling = request.sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, -0.25)
    assert (sampling.n, dict(sampling.logit_bias)) == (3, {5: -1.5})
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([5, 6], [7])
    assert (request.WhichOneof("grammar"), request.regex) == ("regex", "a+")


def test_what_was_not_said_is_absent() -> None:
    request = generate_request("x", GenerateOptions())
    assert request.WhichOneof("grammar") is None
    assert not request.sampling.ListFields()


def test_the_choice_is_a_list() -> None:
    assert list(generate_request("x", GenerateOptions(choice=("yes", "no"))).choice.texts) == ["yes", "no"]


def test_two_grammars_contradict_each_other() -> None:
    with pytest.raises(InvalidRequest, match=r"^json_schema and regex cannot be combined"):
        generate_request("x", GenerateOptions(regex="a", json_schema="{}"))


def test_samples_are_told_apart() -> None:
    assert chunk_from(pb.GenerateChunk(sample_index=4)).sample_index == 4
    assert generation_from(pb.Generation(sample_index=4, finish={"reason": 1})).sample_index == 4


def test_the_command_line_reaches_the_options(tmp_path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps({"type": "object"}))
    grammar.write_text('start: "a"')

    def parsed(line: str) -> GenerateOptions:
        _, bound, _ = app.parse_args(["generate", "hi", *line.split()])
        return options_of(bound.arguments["arguments"])

    line = "--n 2 --repetition-penalty 1.5 --frequency-penalty=-1 --presence-penalty 2 --min-tokens 3"
    options = parsed(f"{line} --logit-bias 5:-1.5 --logit-bias 6:2 --json-schema {schema}")
    assert (options.n, options.min_tokens) == (2, 3)
    assert (options.repetition_penalty, options.frequency_penalty, options.presence_penalty) == (1.5, -1, 2)
    assert options.logit_bias == {5: -1.5, 6: 2.0}
    assert options.json_schema == '{"type": "object"}'
    assert parsed("--regex [a-z]+").regex == "[a-z]+"
    assert parsed(f"--ebnf {grammar}").ebnf == 'start: "a"'
    assert parsed("--choice yes --choice no").choice == ("yes", "no")


@pytest.mark.parametrize("flag", ["--json-schema", "--ebnf"])
def test_a_file_that_is_not_there_is_wrong_usage(flag, tmp_path):
    with pytest.raises(CycloptsError):
        app.parse_args(["generate", "hi", flag, str(tmp_path / "missing")], exit_on_error=False)


@pytest.mark.parametrize("bias", ["5", "a:1"])
def test_a_bias_that_is_no_pair_is_wrong_usage(bias) -> None:
    with pytest.raises(WrongUsage, match="ID:VALUE"):
        options_of(GenerateArguments(answers=AnswerArguments(logit_bias=(bias,))))


def test_a_file_that_cannot_be_read_is_refused(tmp_path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options_of(GenerateArguments(answers=AnswerArguments(json_schema=tmp_path / "missing")))
    assert caught.value.field == "json-schema"


def test_what_is_asked_of_the_prompt_on_the_command_line_reaches_the_options() -> None:
    asked = AnswerArguments(prompt_logprobs=2, prompt_logprobs_start=5, hidden_states="full")
    options = options_of(GenerateArguments(json=True, answers=asked))
    assert (options.prompt_logprobs, options.prompt_logprobs_start, options.hidden_states) == (2, 5, "full")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt_logprobs_start": 0}, "--prompt-logprobs-start needs --prompt-logprobs"),
        ({"hidden_states": "last"}, "--hidden-states needs --json"),
    ],
)
def test_an_option_that_would_be_ignored_without_another_is_wrong_usage(asked, says) -> None:
    with pytest.raises(WrongUsage, match=says):
        options_of(GenerateArguments(answers=AnswerArguments(**asked)))


def test_the_json_line_tells_of_the_prompt_what_came() -> None:
    states = pb.HiddenStates(dtype="float32", hidden_size=2, first_pos=4, states=np.float32([1, -2]).tobytes())
    of_prompt = pb.GenerateChunk(
        request_id="r", prompt_logprobs=[{"token_id": 7}], prompt_first_pos=4, hidden_states=states
    )
    last = pb.GenerateChunk(finish={"reason": 2}, usage={})
    told = answer([chunk_from(of_prompt), chunk_from(last)])
    assert (told["prompt_first_pos"], [item["token_id"] for item in told["prompt_logprobs"]]) == (4, [7])
    assert told["hidden_states"] == {"first_pos": 4, "states": [[1.0, -2.0]]}
    assert answer([chunk_from(last)])["hidden_states"] is None
