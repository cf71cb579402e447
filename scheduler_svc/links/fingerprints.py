"""Checks that a worker serves the model this scheduler has the tokenizer of. Pure."""

from dataclasses import dataclass

from protos.wire.errors import InvalidModelFile
from protos.wire.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModel:
    """What the scheduler's model folder says. Made by the composition root."""

    name: str
    tokenizer_fingerprint: str


def check_model(info: WorkerInfo, expected: ExpectedModel) -> None:
    """Compare the worker's tokenizer with the model folder's.

    Weights are not compared: the same model may be served from other files, and a simulated worker has none.

    Raises:
        InvalidModelFile: they differ.
    """
    actual = info.fingerprints.tokenizer
    if actual != expected.tokenizer_fingerprint:
        message = (
            f"the worker serves {info.model_name!r} with tokenizer {actual[:16]!r}, "
            f"this scheduler {expected.name!r} with {expected.tokenizer_fingerprint[:16]!r}"
        )
        raise InvalidModelFile(message, field="fingerprints.tokenizer")
