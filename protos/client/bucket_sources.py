"""Where the sizes of past forwards are known from: a worker's metrics, or recorded plans."""

import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protos.service.plan_recording import EntryKind, read_entries
from protos.service.recording_payloads import decode_attachment
from protos.wire.buckets import PHASES, real_units
from protos.wire.codec import decode_plan
from protos.wire.enums import GraphPhase
from protos.wire.errors import InvalidRequest
from protos.wire.worker_info import Buckets

_TOKENS = "forwardplane_worker_forward_tokens_bucket"
_BUCKET = "forwardplane_worker_graph_bucket_live"
_BUILD = "forwardplane_worker_build_info"
_SCRAPE_S = 10
_MAX_BYTES = 64 << 20
_PHASES = {phase.name.lower(): phase for phase in GraphPhase}


@dataclass(slots=True)
class Observed:
    """What was seen, of one worker or of several together."""

    forwards: dict[GraphPhase, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """By phase: how many forwards had so many rows or tokens."""
    buckets: dict[GraphPhase, set[int]] = field(default_factory=lambda: defaultdict(set))
    """What the workers capture; empty where they capture nothing."""
    device: str = ""
    """That they run on."""
    note: str = ""
    """What the reader should know of the source."""

    def sizes(self) -> Mapping[GraphPhase, tuple[int, ...]]:
        """Captured sizes, ascending; phases that have some."""
        return {phase: tuple(sorted(found)) for phase, found in self.buckets.items() if found}


def add_metrics(observed: Observed, source: str) -> None:
    """Add what a worker's metrics say: a URL, or a file that holds the text.

    Sizes are known by the classes of the histogram; a forward counts as large as its class allows.

    Raises:
        InvalidRequest: it cannot be read, or is no metrics.
    """
    below: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in _samples(source):
        labels = sample.labels
        if sample.name == _TOKENS:
            below[labels["phase"]][labels["le"]] = sample.value
        elif sample.name == _BUCKET:
            observed.buckets[_PHASES[labels["phase"]]].add(int(labels["bucket"]))
        elif sample.name == _BUILD:
            observed.device = labels.get("device", "")
    for phase, cumulative in below.items():
        before = 0.0
        for limit, value in sorted((float(limit), value) for limit, value in cumulative.items()):
            if value > before and limit != float("inf"):
                observed.forwards[_PHASES[phase]][int(limit)] += int(value - before)
            before = value


def add_plans(observed: Observed, path: Path) -> None:
    """Add the forwards of a recording of `serve --record`. One that was cut off counts as far as it goes.

    Raises:
        InvalidRequest: it is no recording.
        DataFault: it is damaged.
    """
    for entry in read_entries(path):
        if entry.kind is EntryKind.ATTACH:
            info = decode_attachment(entry.payload).info
            observed.device = info.device
            _add_buckets(observed, info.buckets)
        elif entry.kind is EntryKind.PLAN:
            _add_plan(observed, entry.payload)
        elif entry.kind is EntryKind.CUT:
            observed.note = f"{path.name} is cut off {entry.payload.decode()}: what stands before that is used"


def _add_plan(observed: Observed, payload: bytes) -> None:
    plan = decode_plan(payload)
    lens = plan.rows.extend_lens
    for forward in plan.forwards:
        phase = PHASES.get(forward.mode)
        if phase is not None:
            rows = slice(forward.row_begin, forward.row_end)
            num_tokens = int(lens[rows].sum(dtype="int64"))
            size = real_units(phase, num_rows=forward.row_end - forward.row_begin, num_tokens=num_tokens)
            observed.forwards[phase][size] += 1


def _add_buckets(observed: Observed, buckets: Iterable[Buckets]) -> None:
    for entry in buckets:
        observed.buckets[entry.phase].update(entry.sizes)


def _samples(source: str) -> Iterator[Sample]:
    text = _text(source)
    try:
        for family in text_string_to_metric_families(text):
            yield from family.samples
    except ValueError as error:
        raise InvalidRequest(f"{source} is no text of metrics: {error}", field="from_metrics") from None


def _text(source: str) -> str:
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(source, timeout=_SCRAPE_S) as reply:
                return str(reply.read(_MAX_BYTES).decode())
        return Path(source).read_text(encoding="utf-8")
    except (OSError, urllib.error.URLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source} cannot be read: {error}", field="from_metrics") from None
