"""Every file of a rotated recording replays alone to the same results, wherever the rotation falls; a lie is found.

Runs with two plans in flight, shared prefixes, masks, penalties, cancels, stops, retractions and broken streams.
"""

import random

import numpy as np
import pytest

from protos.service.plan_recording import EntryKind, read_entries
from protos.wire.codec import decode_result
from protos.wire.enums import RowStatus
from scheduler_svc.core.settings import CoreSettings
from tests.support.pipelined import PipelinedCore
from tests.support.recorded_runs import PatientRecorder, replayed, rewritten, settings, with_other_token, with_result
from tests.support.rough_load import Trouble, drive, rough_specs
from tests.support.simulated import simulated_executor

pytestmark = pytest.mark.timeout(120)
WORKER = "w0"


def executor():
    return simulated_executor(vocab_size=97, num_pages=60, page_size=4, max_rows=64, max_tokens=128)


def recorded(path, *, requests, max_file_bytes, seed):
    draw = random.Random(seed)
    recorder = PatientRecorder(settings(path / "rec", max_file_bytes=max_file_bytes, max_files=1000))
    recorder.start()
    eager = CoreSettings(budget_tokens=32, new_token_ratio_start=0.0, new_token_ratio_floor=0.0)
    core = PipelinedCore(executor(), eager, recorder=recorder, draw=draw)
    core.attach_with(window=2)
    trouble = Trouble()
    drive(core, rough_specs(draw, requests), draw=draw, trouble=trouble, shake=core.shake)
    recorder.stop()
    core.assert_balanced()
    assert min(trouble.counts[kind] for kind in ("retracted", "ABORT", "STOP")) > 1
    assert core.state.counters.cache.hit_tokens > 20
    return sorted(path.iterdir(), key=lambda found: (len(found.name), found.name))


def results(path):
    return [decode_result(entry.payload) for entry in read_entries(path) if entry.kind is EntryKind.RESULT]


@pytest.mark.parametrize(("max_file_bytes", "requests"), [(1, 50), (3000, 150)])
def test_each_file_alone_compares_equal(tmp_path, max_file_bytes, requests):
    files = recorded(tmp_path, requests=requests, max_file_bytes=max_file_bytes, seed=1)
    again = executor()
    plans = rebuilt = 0
    for path in files:
        replayer = replayed(path, again, worker=WORKER)
        assert replayer.first is None, path.name
        assert replayer.counts.plans == len(results(path))
        plans += replayer.counts.plans
        rebuilt += replayer.counts.rebuilt_pages > 0
    assert len(files) > (80 if max_file_bytes == 1 else 10)
    assert plans > 40
    assert rebuilt > 0.8 * len(files)


def test_a_changed_token_in_any_file_is_the_first_difference(tmp_path):
    files = recorded(tmp_path, requests=80, max_file_bytes=3000, seed=3)
    draw, again, planted = random.Random(4), executor(), 0
    for number, path in enumerate(files):
        sampled = [result for result in results(path) if (result.rows.statuses == RowStatus.TOKEN).any()]
        if not sampled:
            continue
        chosen = draw.choice(sampled)
        row = draw.choice(np.flatnonzero(chosen.rows.statuses == RowStatus.TOKEN).tolist())
        seq = chosen.identity.seq
        change = lambda entry, seq=seq, row=row: with_result(entry, seq, lambda r: with_other_token(r, row))  # noqa: E731
        lie = replayed(rewritten(path, tmp_path / f"lie{number}", change), again, worker=WORKER)
        assert (lie.first.seq, lie.first.row, lie.first.field) == (seq, row, "rows.token_ids")
        assert lie.counts.differing == 1
        planted += 1
    assert planted >= 8
