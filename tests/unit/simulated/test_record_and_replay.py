"""Recorded runs replay to the same results from every file alone; what differs is named to the row; damage is typed."""

import queue
from dataclasses import replace

import numpy as np
import pytest

from protos.service.plan_recording import MAGIC, EntryKind, read_entries
from protos.service.recording_payloads import decode_pages, encode_pages
from protos.wire.enums import RowStatus
from protos.wire.errors import DataFault, InvalidRequest
from protos.wire.plan import MaskColumns, PenaltyColumns
from scheduler_svc.links.recorder import PlanRecorder
from tests.support import plans
from tests.support.plan_driver import Request
from tests.support.recorded_runs import (
    WORKER,
    PatientRecorder,
    RecordedExecutor,
    recorded_run,
    replayed,
    rewritten,
    settings,
    with_other_token,
    with_result,
)
from tests.support.simulated import simulated_executor
from worker_svc.replay.literal_plans import with_literals


def requests(count, *, first=0):
    return [
        Request(
            prompt_ids=[(n * 31 + k * k) % 900 for k in range(20 + n * 3 % 60)],
            max_new=12 + n % 7,
            temperature=0.9 * (n % 2),
            seed=n,
            top_logprobs=2 * (n % 3),
        )
        for n in range(first, first + count)
    ]


@pytest.fixture
def files(tmp_path):
    waves = [requests(6, first=10 * wave) for wave in range(12)]
    return recorded_run(tmp_path / "rec", simulated_executor(num_pages=60), waves, max_file_bytes=4096)


def test_every_file_replays_alone_to_the_same_results(files):
    assert len(files) >= 3
    seen = set()
    for path in files:
        replayer = replayed(path, simulated_executor(num_pages=60))
        assert (replayer.counts.differing, replayer.first) == (0, None)
        assert replayer.counts.plans > 5
        seen.add(replayer.counts.rebuilt_pages > 0)
    assert seen == {True, False}


def test_a_replay_without_the_pages_of_its_opening_differs(files, tmp_path):
    without = rewritten(files[0], tmp_path / "w", lambda entry: None if entry.kind is EntryKind.PAGES else entry)
    assert replayed(without, simulated_executor(num_pages=60)).first is not None


def test_a_flipped_token_is_reported_at_its_row(files, tmp_path):
    oldest = files[-1]
    flipped = rewritten(oldest, tmp_path / "f", lambda entry: with_result(entry, 9, lambda r: with_other_token(r, 2)))
    first = replayed(flipped, simulated_executor(num_pages=60)).first
    assert (first.seq, first.row, first.handle, first.field) == (9, 2, 3, "rows.token_ids")
    assert int(first.expected) == int(first.got) + 1


def test_a_changed_log_probability_is_reported_beyond_the_tolerance(files, tmp_path):
    def change(result):
        values = result.logprobs.output.copy()
        row = int(np.flatnonzero(values)[0])
        values[row] -= 0.25
        changed_rows.append(row)
        return replace(result, logprobs=replace(result.logprobs, output=values))

    changed_rows = []
    path = rewritten(files[-1], tmp_path / "f", lambda entry: with_result(entry, 12, change))
    first = replayed(path, simulated_executor(num_pages=60), tolerance=0.2).first
    assert (first.seq, first.row, first.field) == (12, changed_rows[0], "logprobs.output")
    assert replayed(path, simulated_executor(num_pages=60), tolerance=0.3).first is None


def test_references_and_terms_replay(tmp_path):
    recorder = PatientRecorder(settings(tmp_path / "rec", max_file_bytes=1))
    recorder.start()
    for _ in range(2):
        executor = RecordedExecutor(simulated_executor(), recorder)
        prompt = plans.extend(0, 20, ids=range(20), pages=(1, 2), handle=1)
        executor.execute(plans.make_plan([prompt], info=executor.worker_info(), seq=1))
        for seq in range(2, 9):
            row = plans.decode(18 + seq, pages=(1, 2), handle=1, reference=(seq - 1, 0))
            executor.execute(plans.make_plan([row], info=executor.worker_info(), seq=seq))
    recorder.stop()
    found = [replayed(path, simulated_executor()) for path in tmp_path.iterdir()]
    assert all(replayer.first is None for replayer in found)
    assert len(found) > 4


def test_a_literal_still_counts_for_the_penalties_of_its_row():
    row = plans.decode(20, handle=1, reference=(3, 0))
    penalties = PenaltyColumns(
        repetition=plans.f32(1.5),
        frequency=plans.f32(0),
        presence=plans.f32(0),
        prompt_indptr=plans.u32(0, 0),
        prompt_ids=plans.u32(),
        output_indptr=plans.u32(0, 1),
        output_ids=plans.u32(4),
        output_counts=plans.u32(1),
    )
    plan = plans.make_plan([row], seq=4, penalties=penalties)
    found = with_literals(plan, {(3, 0): (1, 0, 20, 4)})
    assert (found.tokens.ids.tolist(), found.tokens.sources) == ([4], None)
    assert found.penalties.output_counts.tolist() == [2]
    found = with_literals(plan, {(3, 0): (1, 0, 20, 9)})
    assert dict(zip(found.penalties.output_ids.tolist(), found.penalties.output_counts.tolist(), strict=True)) == {
        4: 1,
        9: 1,
    }


@pytest.mark.parametrize(
    "known", [{(2, 0): (1, 0, 20, 9)}, {(3, 1): (1, 0, 20, 9)}, {(3, 0): (2, 0, 20, 9)}, {(3, 0): (1, 1, 20, 9)}]
)
def test_a_reference_that_no_worker_would_answer_stays_one(known):
    plan = plans.make_plan([plans.decode(20, handle=1, reference=(3, 0))], seq=4)
    assert with_literals(plan, known) is plan
    assert with_literals(plan, {(3, 0): (1, 0, 21, 9)}) is plan
    assert with_literals(plan, {(3, 0): (1, 0, 20, 9)}, oldest_seq=4) is plan
    assert with_literals(plan, {(3, 0): (1, 0, 20, 9)}) is not plan


def test_rows_that_refer_to_what_failed_before_a_rotation_fail_again(tmp_path):
    recorder = PatientRecorder(settings(tmp_path / "rec", max_file_bytes=1))
    recorder.start()
    executor = RecordedExecutor(simulated_executor(), recorder)
    info = executor.worker_info()
    prompts = [plans.extend(0, 20, ids=range(20), pages=(1 + 2 * n, 2 + 2 * n), handle=n) for n in range(2)]
    executor.execute(plans.make_plan(prompts, info=info, seq=1))
    for seq, source in ((2, 0), (3, 9), (4, 2)):
        rows = [
            plans.decode(18 + seq, pages=(1, 2), handle=0, reference=(1 if seq == 2 else seq - 1, 0)),
            plans.decode(20, pages=(3, 4), handle=1, reference=(1, source)),
        ]
        got = executor.execute(plans.make_plan(rows, info=info, seq=seq))
        assert got.rows.statuses[1] == RowStatus.FAILED
    recorder.stop()
    found = [replayed(path, simulated_executor()) for path in tmp_path.iterdir()]
    assert sum(replayer.counts.plans for replayer in found) == 4
    assert [replayer.first for replayer in found] == [None] * len(found)


def test_a_full_queue_never_waits_and_marks_the_file(tmp_path, caplog):
    recorder = PlanRecorder(settings(tmp_path / "rec"))
    recorder._queue = queue.Queue(3)
    info = simulated_executor().worker_info()
    recorder.attached(WORKER, epoch=1, term=1, info=info)
    for seq in range(1, 9):
        recorder.plan_sent(WORKER, plans.make_plan([plans.extend(0, 4)], info=info, seq=seq))
    recorder.start()
    recorder.stop()
    assert [entry.kind for entry in read_entries(tmp_path / "rec")].count(EntryKind.DROPPED) == 1
    assert "recording fell behind and is incomplete" in caplog.text
    with pytest.raises(DataFault, match="incomplete"):
        replayed(tmp_path / "rec", simulated_executor())


def test_pages_that_are_not_all_known_are_refused(tmp_path, files):
    def change(entry):
        if entry.kind is not EntryKind.PAGES:
            return entry
        return replace(entry, payload=encode_pages(replace(decode_pages(entry.payload), is_complete=False)))

    path = rewritten(files[0], tmp_path / "f", change)
    with pytest.raises(DataFault, match="does not know every page"):
        replayed(path, simulated_executor(num_pages=60))


def test_a_result_without_its_plan_and_another_geometry_are_refused(tmp_path, files):
    without = rewritten(files[-1], tmp_path / "f", lambda entry: None if entry.kind is EntryKind.PLAN else entry)
    with pytest.raises(DataFault, match="result of plan 1, and not the plan"):
        replayed(without, simulated_executor(num_pages=60))
    with pytest.raises(InvalidRequest, match="other pools"):
        replayed(files[-1], simulated_executor(num_pages=60, page_size=32))


def test_a_mask_travels_too(tmp_path):
    recorder = PlanRecorder(settings(tmp_path / "rec"))
    recorder.start()
    executor = RecordedExecutor(simulated_executor(), recorder)
    masks = MaskColumns(masks=plans.make_masks(1000)[1:2], row_masks=plans.u32(1))
    plan = plans.make_plan([plans.extend(0, 20)], info=executor.worker_info(), masks=masks)
    assert executor.execute(plan).rows.token_ids[0] in (3, 4)
    recorder.stop()
    assert replayed(tmp_path / "rec", simulated_executor()).first is None


def test_a_file_that_cannot_be_written_is_refused_at_start_and_old_files_move_on(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be written"):
        PlanRecorder(settings(tmp_path / "none" / "rec")).start()
    for content in range(5):
        recorder = PlanRecorder(settings(tmp_path / "rec", max_files=3))
        recorder.start()
        recorder.stop()
        (tmp_path / "rec").write_bytes(MAGIC + str(content).encode())
    kept = {path.name: path.read_bytes().removeprefix(MAGIC) for path in tmp_path.iterdir()}
    assert kept == {"rec": b"4", "rec.1": b"3", "rec.2": b"2"}
