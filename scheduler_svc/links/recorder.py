"""Writes every plan and result of all workers to files, beside the loop: a bounded queue and a thread of its own.

Guards: the loop never waits. What does not fit the queue is left out, and the file says so at that place. A file that
cannot be written ends the recording, not the service.
"""

import logging
import queue
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from protos.service.plan_recording import Entry, EntryKind, RecordingHeader, RecordingWriter, is_recording
from protos.service.recording_payloads import Attachment, encode_attachment, encode_pages
from protos.wire.codec import encode_plan, encode_result
from protos.wire.errors import InvalidRequest
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.links.page_history import PageHistory

_logger = logging.getLogger(__name__)

_QUEUE_ITEMS = 512
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Where and how much is recorded."""

    path: Path
    """The newest file; older ones are `path.1`, `path.2` …"""
    max_file_bytes: int
    max_files: int
    """With the newest one."""
    model: str
    weights_fingerprint: str


@dataclass(slots=True)
class _Term:
    """What the thread knows of one worker."""

    attachment: Attachment
    history: PageHistory
    in_flight: dict[int, ForwardPlan]


_Content = ForwardPlan | ForwardResult | Attachment


class PlanRecorder:
    """One for the process. `attached`, `plan_sent` and `result_received` are called in the event loop."""

    def __init__(self, settings: RecordingSettings) -> None:
        self._settings = settings
        self._queue: queue.Queue[tuple[str, _Content] | None] = queue.Queue(_QUEUE_ITEMS)
        self._terms: dict[str, _Term] = {}
        self._part = 0
        self._dropped = 0
        self._told_dropped = 0
        self._writer: RecordingWriter | None = None
        self._thread = threading.Thread(target=self._guarded, name="plan recorder", daemon=True)

    def start(self) -> None:
        """Begin; a file that is there already becomes an older one.

        Raises:
            InvalidRequest: the file cannot be written, or is there and no recording.
        """
        path = self._settings.path
        if path.exists() and not is_recording(path):
            message = f"{path.name} is there already and is no recording of plans: choose another name"
            raise InvalidRequest(message, field="record")
        _logger.warning("plans are recorded: the files hold token ids", extra={"file": self._settings.path.name})
        try:
            self._writer = self._open()
        except OSError as error:
            message = f"the recording {self._settings.path.name} cannot be written: {error.strerror}"
            raise InvalidRequest(message, field="record") from error
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued and end the file. Waits for that."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def attached(self, worker: str, *, epoch: int, term: int, info: WorkerInfo) -> None:
        """A term begins."""
        self._put(worker, Attachment(epoch=epoch, term=term, info=info))

    def plan_sent(self, worker: str, plan: ForwardPlan) -> None:
        """A plan goes out."""
        self._put(worker, plan)

    def result_received(self, worker: str, result: ForwardResult) -> None:
        """Its answer came."""
        self._put(worker, result)

    def _put(self, worker: str, content: _Content) -> None:
        try:
            self._queue.put_nowait((worker, content))
        except queue.Full:
            self._dropped += 1

    # --- the thread

    def _guarded(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            extra = {"file": self._settings.path.name, "error": error.strerror}
            _logger.error("recording ended: the file cannot be written", extra=extra)  # noqa: TRY400 (the disk's state, not ours)
            while self._queue.get() is not None:
                pass

    def _write_all(self) -> None:
        assert self._writer is not None
        while True:
            try:
                item = self._queue.get(timeout=_FLUSH_S)
            except queue.Empty:
                self._writer.flush()
                continue
            self._note_dropped()
            if item is None:
                self._writer.close()
                return
            self._add(*item)
            if self._writer.num_bytes >= self._settings.max_file_bytes:
                self._rotate()

    def _note_dropped(self) -> None:
        """Entries are missing before the one that is written next, or soon after it: said at the first chance."""
        dropped = self._dropped
        if dropped == self._told_dropped or self._writer is None:
            return
        extra = {"file": self._settings.path.name, "dropped": dropped}
        _logger.error("recording fell behind and is incomplete", extra=extra)
        self._told_dropped = dropped
        self._writer.add(Entry(EntryKind.DROPPED, "", str(dropped).encode()))
        for term in self._terms.values():
            term.history.lost()

    def _add(self, worker: str, content: _Content) -> None:
        assert self._writer is not None
        if isinstance(content, Attachment):
            self._terms[worker] = _Term(content, PageHistory(content.info), {})
            self._writer.add(Entry(EntryKind.ATTACH, worker, encode_attachment(content)))
            return
        term = self._terms.get(worker)
        if term is None:
            return
        seq = content.identity.seq
        if isinstance(content, ForwardPlan):
            term.in_flight[seq] = content
            self._writer.add(Entry(EntryKind.PLAN, worker, encode_plan(content)))
            return
        self._writer.add(Entry(EntryKind.RESULT, worker, encode_result(content)))
        plan = term.in_flight.pop(seq, None)
        if plan is None:
            term.history.lost()
        else:
            term.history.answered(plan, content)

    def _rotate(self) -> None:
        """End the file and begin the next one with what is needed to read it alone."""
        assert self._writer is not None
        self._writer.close()
        self._part += 1
        self._writer = self._open()
        for worker, term in self._terms.items():
            self._writer.add(Entry(EntryKind.ATTACH, worker, encode_attachment(term.attachment)))
            self._writer.add(Entry(EntryKind.PAGES, worker, encode_pages(term.history.snapshot())))
            for plan in term.in_flight.values():
                self._writer.add(Entry(EntryKind.PLAN, worker, encode_plan(plan)))

    def _open(self) -> RecordingWriter:
        settings = self._settings
        _shift(settings.path, settings.max_files)
        header = RecordingHeader(
            model=settings.model, weights_fingerprint=settings.weights_fingerprint, part=self._part
        )
        return RecordingWriter(settings.path, header)


def _shift(path: Path, max_files: int) -> None:
    """Give each file the next older name; the oldest goes."""
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, max_files))]
    names[-1].unlink(missing_ok=True)
    for newer, older in reversed(list(pairwise(names))):
        if newer.exists():
            newer.rename(older)
