"""Options of `forwardplane replay` that a recording cannot use are refused before anything is started."""

from pathlib import Path

import pytest

from protos.client.replay_command import ReplayOptions, _flags
from protos.wire.errors import InvalidRequest
from tests.support.core_harness import small_info


def flags(numerics: str, ratio: float | None) -> list[str]:
    options = ReplayOptions(simulated_eos_ratio=ratio)
    return _flags(Path("run"), Path("model"), options=options, info=small_info(numerics=numerics))


def test_the_share_of_ends_is_a_simulated_workers():
    assert "--simulated-eos-ratio" not in flags("fast", None)
    for ratio in (0.0, 0.5):
        assert flags("simulated", ratio)[-1] == str(ratio)
        with pytest.raises(InvalidRequest, match="needs a recording of a simulated worker") as caught:
            flags("fast", ratio)
        assert caught.value.field == "--simulated-eos-ratio"
    assert flags("simulated", None)[-1] == "0.0"
