"""What captured graphs took at the last start, by phase, in a small file keyed by fingerprint.

Capacity planning sets that much aside before any graph exists. Guards: a file that is missing, damaged or of another
worker counts as no measurement, and a write replaces the file as a whole.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from protos.wire.enums import GraphPhase

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 64
"""Older ones are dropped."""
_MOST_BYTES = 1 << 40
"""Of one phase's graphs; more was never measured."""


def graph_fingerprint(**facts: object) -> str:
    """Names everything that a graph's memory depends on: weights, types, sizes, buckets, releases."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class GraphMemoryStore:
    """One file. Written by whoever captures graphs, read when pools are sized."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, fingerprint: str) -> dict[GraphPhase, int]:
        """Bytes by phase; empty without a measurement."""
        entry = self._entries().get(fingerprint, {})
        return {phase: entry[phase.name] for phase in GraphPhase if phase.name in entry}

    def write(self, fingerprint: str, bytes_by_phase: Mapping[GraphPhase, int]) -> None:
        """Remember a measurement. A file that cannot be written costs the next start its figure, no more."""
        entries = self._entries()
        entries.pop(fingerprint, None)
        entries[fingerprint] = {phase.name: int(count) for phase, count in bytes_by_phase.items()}
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file, ExitStack() as undone:
                undone.callback(Path(file.name).unlink, missing_ok=True)
                json.dump(kept, file)
                file.close()
                Path(file.name).replace(self._path)
                undone.pop_all()
        except OSError as error:
            logger.warning("graph memory was not stored", extra={"path": str(self._path), "problem": str(error)})

    def _entries(self) -> dict[str, dict[str, int]]:
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("graph memory cannot be read", extra={"path": str(self._path), "problem": str(error)})
            return {}
        good = {key: entry for key, entry in found.items() if _is_entry(entry)} if isinstance(found, dict) else {}
        if not isinstance(found, dict) or len(good) < len(found):
            problem = "entries that are no measurements are ignored"
            logger.warning("graph memory cannot be read", extra={"path": str(self._path), "problem": problem})
        return good


def _is_entry(entry: object) -> bool:
    counts = entry.values() if isinstance(entry, dict) else [-1]
    return all(type(count) is int and 0 <= count <= _MOST_BYTES for count in counts)
