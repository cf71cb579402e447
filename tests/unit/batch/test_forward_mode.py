from dataclasses import fields

import pytest

from protos.wire.enums import ForwardMode, GraphPhase
from worker_svc.batch.forward_mode import EXECUTABLE_MODES, AttentionSide, ModeTraits, traits_of

# mode | extend | extend w/o speculation | decode-or-idle | decode-graph eligible | context-parallel extend | CPU graph
TRUTH_TABLE = """
EXTEND        y y - - y -
DECODE        - - y y - y
MIXED         y y - - y -
IDLE          - - y y - -
TARGET_VERIFY y - - y - -
DRAFT_EXTEND  o - - - o -
PREBUILT      - - - - - -
SPLIT_PREFILL y y - - - -
DLLM_EXTEND   y y - y - -
"""
COLUMNS = [field.name for field in fields(ModeTraits)][:6]
CELLS = [
    pytest.param(ForwardMode[line.split()[0]], column, flag, id=f"{line.split()[0]}-{column}")
    for line in TRUTH_TABLE.strip().splitlines()
    for column, flag in zip(COLUMNS, line.split()[1:], strict=True)
]


def test_the_columns_are_those_of_the_table():
    assert COLUMNS == [
        "is_extend",
        "is_extend_without_speculation",
        "is_decode_or_idle",
        "decode_graph_eligible",
        "context_parallel_extend",
        "cpu_graph",
    ]
    assert len(CELLS) == 9 * 6


@pytest.mark.parametrize(("mode", "column", "flag"), CELLS)
def test_every_predicate_of_every_mode_is_that_of_the_truth_table(mode, column, flag):
    assert getattr(traits_of(mode), column) is (flag == "y")


def test_draft_extend_counts_only_for_a_caller_that_opts_in():
    for mode in ForwardMode:
        plain = traits_of(mode).counts_as_extend()
        assert plain == traits_of(mode).is_extend
        opted = traits_of(mode).counts_as_extend(with_draft_extend=True)
        assert opted == (plain or mode.name == "DRAFT_EXTEND")


def test_the_mode_alone_decides_whether_extend_lengths_exist():
    without = {mode.name for mode in ForwardMode if not traits_of(mode).has_extend_group}
    assert without == {"DECODE", "IDLE"}


def test_mixed_counts_as_prefill():
    assert traits_of(ForwardMode["MIXED"]).graph_phase is GraphPhase.PREFILL
    assert traits_of(ForwardMode["DECODE"]).graph_phase is GraphPhase.DECODE
    assert traits_of(ForwardMode["IDLE"]).graph_phase is None


def test_what_runs_here():
    assert {mode.name for mode in EXECUTABLE_MODES} == {"EXTEND", "DECODE", "MIXED", "IDLE"}
    for mode in EXECUTABLE_MODES:
        traits = traits_of(mode)
        assert traits.runs_model == traits.samples == (traits.attention_side is not AttentionSide.NONE)


def test_verify_does_not_sample_and_idle_is_not_decode_for_attention():
    assert not traits_of(ForwardMode["TARGET_VERIFY"]).samples
    assert traits_of(ForwardMode["IDLE"]).attention_side is AttentionSide.NONE
