"""Checks that a worker serves the model this scheduler has the tokenizer of. Pure."""

from dataclasses import dataclass

from protos.wire.errors import InvalidModelFile
from protos.wire.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModel:
    """What the scheduler's model folder says. Made by the composition root."""

    name: str
    tokenizer_fingerprint: str
    weights_fingerprint: str


def check_model(info: WorkerInfo, expected: ExpectedModel) -> None:
    """Compare the worker's fingerprints with the model folder's.

    A worker without weights (a simulated one) says nothing of them; each has a tokenizer to agree on.

    Raises:
        InvalidModelFile: they differ.
    """
    actual = info.fingerprints
    _compare("tokenizer", actual.tokenizer, expected.tokenizer_fingerprint)
    if actual.weights:
        _compare("weights", actual.weights, expected.weights_fingerprint)


def _compare(field: str, actual: str, expected: str) -> None:
    if actual != expected:
        message = f"the worker's {field} fingerprint is {actual[:16]!r}, the model folder's {expected[:16]!r}"
        raise InvalidModelFile(message, field=f"fingerprints.{field}")
