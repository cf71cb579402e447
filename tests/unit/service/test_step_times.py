"""Step times: interpolation is plain, bad tables are named."""

import tomllib

import pytest

from protos.service.step_times import FixedStep, StepShape, read_step_times
from protos.wire.errors import InvalidRequest

SMALL = """
name = "small"
derivation = "made up"
kv_bytes = 1000000
kv_bytes_per_token = 10
[decode]
rows = [1, 3]
context_tokens = [0, 100]
step_ms = [[1.0, 2.0], [3.0, 6.0]]
[prefill]
tokens = [10, 20]
step_ms = [1.0, 5.0]
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        (StepShape(rows=1, tokens=1, context=0), 1.0),
        (StepShape(rows=1, tokens=1, context=50), 1.5),
        (StepShape(rows=2, tokens=2, context=200), 4.0),
        (StepShape(rows=3, tokens=3, context=600), 9.0),
        (StepShape(rows=5, tokens=5, context=500), 10.0),
        (StepShape(rows=1, tokens=15, context=15), 3.0),
        (StepShape(rows=1, tokens=30, context=30), 9.0),
        (StepShape(rows=0, tokens=0, context=0), 0.0),
    ],
)
def test_steps_lie_on_the_lines_between_and_beyond_the_entries(small, shape, milliseconds):
    assert read_step_times(small, field="simulated_steps").step_s(shape) == pytest.approx(milliseconds / 1e3)


def test_a_fixed_step_is_fixed_and_an_idle_plan_is_free():
    cost = FixedStep(5.0)
    assert cost.step_s(StepShape(rows=9, tokens=900, context=9000)) == 0.005
    assert cost.step_s(StepShape(rows=0, tokens=0, context=0)) == 0.0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (SMALL.replace("[1, 3]", "[3, 1]"), "rows must rise"),
        (SMALL.replace("[3.0, 6.0]", "[3.0]"), "2 lists of 2"),
        (SMALL.replace("[1.0, 5.0]", "[1.0]"), "2 numbers"),
        (SMALL.replace("[1.0, 5.0]", "[1.0, -5.0]"), "prefill.step_ms"),
        (SMALL.replace("[1.0, 5.0]", "[1.0, nan]"), "prefill.step_ms"),
        (SMALL + "extra = 1", "extra"),
        (SMALL.replace('name = "small"', ""), "name"),
        ("not toml", "no TOML"),
    ],
)
def test_a_bad_table_is_refused_by_the_entry(small, wrong, named):
    small.write_text(wrong)
    with pytest.raises(InvalidRequest, match=named):
        read_step_times(small, field="simulated_steps")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"none\.toml cannot be read"):
        read_step_times(tmp_path / "none.toml", field="simulated_steps")
    assert tomllib.loads(SMALL)["name"] == "small"
