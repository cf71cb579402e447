import numpy as np
import pytest

from protos.wire.enums import FinishReason, RowFailure
from protos.wire.errors import InvalidRequest
from scheduler_svc.core.events import Grammar, MaskReady, RequestFinished, Sampling, StreamKey
from tests.support.core_harness import CoreHarness, make_spec, mask_answer, oracle, small_info

GRAMMAR = Grammar("regex", "abc")


def make_harness(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(**changes))
    return harness


def check(harness: CoreHarness, *stream_ids: int) -> None:
    for stream_id in stream_ids:
        assert harness.output(stream_id) == oracle(harness.infos["w0"], harness.specs[StreamKey(0, stream_id)])


def test_counts_travel_only_for_rows_that_have_penalties_and_sample():
    harness = make_harness()
    penal = Sampling(repetition_penalty=1.5, presence_penalty=0.5)
    harness.submit(
        make_spec(1, prompt=[3, 3, 4], sampling=penal, max_tokens=3),
        make_spec(2, prompt=[5, 6], max_tokens=3),
        make_spec(3, prompt=[7], sampling=Sampling(frequency_penalty=1.0), max_tokens=3),
    )
    harness.run()
    check(harness, 1, 2, 3)
    first, last = harness.plans[0][1].penalties, harness.plans[-1][1].penalties
    assert first.repetition.tolist() == [1.5, 1, 1]
    assert first.presence.tolist() == [0.5, 0, 0]
    assert first.frequency.tolist() == [0, 0, 1]
    assert first.prompt_indptr.tolist() == [0, 2, 2, 2]
    assert first.prompt_ids.tolist() == [3, 4]
    assert first.output_ids.tolist() == []
    assert sum(last.output_counts[: last.output_indptr[1]].tolist()) == 2
    assert last.output_indptr[1] == last.output_indptr[2]


def test_equal_masks_are_sent_once_and_stop_ids_are_banned_until_min_tokens():
    harness = make_harness()
    banned = Sampling(banned_ids=(8, 2))
    stops = frozenset({11, 12})
    harness.submit(
        make_spec(1, sampling=banned),
        make_spec(2, sampling=banned),
        make_spec(3),
        make_spec(4, stop_token_ids=stops, min_tokens=2),
    )
    harness.run()
    check(harness, 1, 2, 3, 4)
    masks = [plan.masks for _, plan in harness.plans]
    assert masks[0].row_masks.tolist() == [1, 1, 0, 2]
    assert [mask.denied_ids.tolist() for mask in masks[0].masks] == [[2, 8], [11, 12]]
    assert masks[2].row_masks.tolist() == [1, 1, 0, 0]


def test_a_bias_without_temperature_travels_alone():
    harness = make_harness()
    harness.submit(make_spec(1, sampling=Sampling(bias=((4, 2.5), (1, -1.0)))), make_spec(2))
    harness.run()
    check(harness, 1, 2)
    sampling = harness.plans[0][1].sampling
    assert (sampling.temperatures, sampling.seeds) == (None, None)
    assert sampling.bias_indptr.tolist() == [0, 2, 2]
    assert (sampling.bias_ids.tolist(), sampling.bias_values.tolist()) == ([4, 1], [2.5, -1])


def test_a_sample_index_travels_when_it_is_not_zero():
    harness = make_harness()
    same = {"temperature": 1.0, "seed": 4}
    harness.submit(*[make_spec(9, sampling=Sampling(**same))])
    harness.run()
    assert harness.plans[0][1].rows.sample_indices is None
    harness.submit(make_spec(1, sampling=Sampling(**same, sample_index=3)), make_spec(2, sampling=Sampling(**same)))
    harness.run()
    check(harness, 1, 2)
    assert harness.plans[-1][1].rows.sample_indices.tolist() == [3, 0]


def test_a_row_without_a_candidate_fails_alone_and_at_once():
    harness = make_harness()
    harness.fail_row = lambda plan, row: RowFailure.NO_CANDIDATE if plan.rows.handles[row] == 1 else None
    harness.submit(make_spec(1), make_spec(2))
    harness.run()
    check(harness, 2)
    error = harness.end(1).error
    assert (type(error), error.field) == (InvalidRequest, "sampling")
    assert "nothing to sample after 0 tokens" in error.message
    assert harness.state.counters.failed_rows == 1


def test_a_grammar_row_waits_for_its_mask_and_is_in_one_plan_at_a_time():
    harness = make_harness(window=3)
    harness.submit(make_spec(1, grammar=GRAMMAR, max_tokens=3), make_spec(2, max_tokens=3))
    assert [plan.rows.handles.tolist() for _, plan in harness.plans] == [[2]] * 3
    assert harness.state.gauges().waiting == 1
    seen = 0
    while harness.masks or any(harness.pending.values()):
        if harness.masks:
            harness.answer_mask()
        in_flight = [plan for plan in harness.pending["w0"] if 1 in plan.rows.handles]
        assert len(in_flight) <= 1
        seen += len(in_flight)
        if harness.pending["w0"]:
            harness.deliver()
    assert seen >= 3
    check(harness, 1, 2)
    harness.assert_balanced()


def test_masks_of_ended_requests_and_of_other_positions_are_ignored():
    harness = make_harness()
    harness.submit(make_spec(1, grammar=GRAMMAR))
    wanted = harness.masks.popleft()
    harness.step(MaskReady(StreamKey(0, 9), 0, np.full(13, 255, np.uint8)))
    harness.step(MaskReady(wanted.stream, 1, np.full(13, 255, np.uint8)))
    assert not harness.plans
    harness.step(mask_answer(wanted))
    harness.step(MaskReady(wanted.stream, 0, np.full(13, 255, np.uint8)))
    assert len(harness.plans) == 1
    harness.run()
    check(harness, 1)
    harness.step(mask_answer(wanted))
    assert isinstance(harness.end(1), RequestFinished)


def test_a_mask_that_cannot_be_made_or_allows_nothing_fails_its_request():
    harness = make_harness()
    harness.submit(*[make_spec(index, grammar=GRAMMAR, sampling=Sampling(banned_ids=(0,))) for index in (1, 2)])
    one, two = harness.masks
    harness.masks.clear()
    harness.step(MaskReady(one.stream, 0, InvalidRequest("too complex", field="regex")))
    harness.step(MaskReady(two.stream, 0, np.packbits([1] + [0] * 103, bitorder="little")))
    assert harness.end(1).error.field == "regex"
    assert "leave nothing to sample after 0 tokens" in harness.end(2).error.message
    assert not harness.plans
    harness.assert_balanced()


EOS = 2
"""Of the made-up masks below."""


def end_of_mask(wanted, *ids):
    flags = np.zeros(104, np.uint8)
    flags[list(ids)] = 1
    bits = np.packbits(flags, bitorder="little")
    return MaskReady(wanted.stream, len(wanted.output_ids), bits, is_complete=EOS in ids)


@pytest.mark.parametrize(
    "limits",
    [
        {"sampling": Sampling(allowed_ids=(7, 8))},
        {"sampling": Sampling(banned_ids=(EOS, 9))},
        {"sampling": Sampling(banned_ids=(9,)), "min_tokens": 5},
    ],
    ids=["allowed", "banned", "min_tokens"],
)
def test_a_match_that_cannot_go_on_ends_its_request_whatever_its_limits_forbid(limits):
    harness = make_harness()
    harness.submit(make_spec(1, grammar=GRAMMAR, stop_token_ids=frozenset({EOS}), max_tokens=9, **limits))
    for ids in ([7], [8], [EOS, 9]):
        harness.step(end_of_mask(harness.masks.popleft(), *ids))
        if harness.pending["w0"]:
            harness.deliver()
    assert harness.output(1) == [7, 8]
    end = harness.end(1)
    assert (end.reason, end.stop_token_id, end.usage.output_tokens) == (FinishReason.STOP, None, 2)
    harness.assert_balanced()


def test_a_match_that_can_go_on_does_though_it_may_not_end():
    harness = make_harness()
    harness.submit(make_spec(1, grammar=GRAMMAR, sampling=Sampling(banned_ids=(EOS,)), max_tokens=2))
    for ids in ([7, EOS], [8, EOS]):
        harness.step(end_of_mask(harness.masks.popleft(), *ids))
        if harness.pending["w0"]:
            harness.deliver()
    assert harness.output(1) == [7, 8]
    assert harness.end(1).reason is FinishReason.LENGTH


def test_an_empty_match_that_cannot_go_on_ends_before_anything_is_sampled():
    harness = make_harness()
    harness.submit(make_spec(1, grammar=GRAMMAR, sampling=Sampling(banned_ids=(EOS, 9))))
    harness.step(end_of_mask(harness.masks.popleft(), EOS, 9))
    assert harness.end(1).reason is FinishReason.STOP
    assert not harness.plans
    harness.assert_balanced()


@pytest.mark.parametrize("width", [90, 97, 96, 110])
def test_a_grammar_mask_is_as_long_as_the_workers_logits(width):
    harness = make_harness(logits_width=width)
    harness.submit(make_spec(1, prompt=[1], grammar=GRAMMAR))
    harness.step(MaskReady(StreamKey(0, 1), 0, np.full(13, 255, np.uint8)))
    (mask,) = harness.plans[0][1].masks.masks
    flags = np.unpackbits(mask.allowed_bits, bitorder="little")
    assert len(mask.allowed_bits) == -(-width // 8)
    assert flags.sum() == min(width, 104)


def test_cancelling_while_a_mask_is_made_ends_the_request():
    harness = make_harness()
    harness.submit(make_spec(1, grammar=GRAMMAR))
    harness.cancel(1, FinishReason.ABORT)
    assert harness.end(1).reason is FinishReason.ABORT
    harness.answer_mask()
    harness.assert_balanced()
