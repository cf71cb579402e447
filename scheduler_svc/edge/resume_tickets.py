"""Tickets with which a caller goes on elsewhere: what a stream was admitted with, sealed, and held by the caller.

A ticket is a fixed layout and its MAC. It holds nothing that has to be secret, and proves that a server with the same
key admitted that request, of that caller, for that model, with that seed. Knows nothing of what was generated.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from protos.service.model_files import ModelCard
from protos.wire.errors import InvalidRequest, TicketRefused
from scheduler_svc.edge.caller_identity import CallerIdentity

MIN_KEY_BYTES = 32
REQUEST_ID_BYTES = 16
_VERSION = 1
_KEY_ID_BYTES = 8
_DIGEST_BYTES = 32
_MAC_BYTES = 32
# Version, key, end of validity in Unix seconds, request id, seed, sample, digest of the request.
_LAYOUT = struct.Struct(f"<B{_KEY_ID_BYTES}sQ{REQUEST_ID_BYTES}sQH{_DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What one sample was admitted with."""

    request_id: str
    seed: int
    sample_index: int
    expires_at: int
    """Unix seconds."""


class TicketDesk:
    """Seals and opens tickets; made by the edge's composition root."""

    def __init__(self, keys: Sequence[bytes], *, unix_clock: Callable[[], float]) -> None:
        """Take one or more keys of at least `MIN_KEY_BYTES`: the first seals, each opens."""
        self._keys = {_key_id(key): key for key in keys}
        self._sealing = keys[0]
        self._unix_clock = unix_clock

    def expiry(self, seconds: float) -> int:
        """Unix seconds, so many from now."""
        return int(self._unix_clock() + seconds) + 1

    def seconds_left(self, ticket: Ticket) -> float:
        """Until it is too old."""
        return ticket.expires_at - self._unix_clock()

    def seal(self, ticket: Ticket, digest: bytes) -> bytes:
        """The ticket for the request of that digest."""
        body = _LAYOUT.pack(
            _VERSION,
            _key_id(self._sealing),
            ticket.expires_at,
            bytes.fromhex(ticket.request_id),
            ticket.seed,
            ticket.sample_index,
            digest,
        )
        return body + _mac(self._sealing, body)

    def open(self, sealed: bytes, digest: bytes) -> Ticket:
        """What the ticket says.

        Raises:
            TicketRefused: it is not a ticket of a key of this server, not of the request of that digest, or too old.
        """
        if len(sealed) != _LAYOUT.size + _MAC_BYTES or sealed[0] != _VERSION:
            raise TicketRefused("the ticket is not one of this version", field="resume")
        body, mac = sealed[: _LAYOUT.size], sealed[_LAYOUT.size :]
        _, key_id, expires_at, request_id, seed, sample_index, of_request = _LAYOUT.unpack(body)
        key = self._keys.get(key_id)
        if key is None or not hmac.compare_digest(mac, _mac(key, body)):
            raise TicketRefused("the ticket was not sealed with a key of this server", field="resume")
        if not hmac.compare_digest(of_request, digest):
            raise TicketRefused("the ticket is of another request, caller or model", field="resume")
        ticket = Ticket(request_id=request_id.hex(), seed=seed, sample_index=sample_index, expires_at=expires_at)
        if self.seconds_left(ticket) <= 0:
            raise TicketRefused("the ticket is too old", field="resume")
        return ticket


def request_digest(
    request: GenerateRequest, prompt_ids: Sequence[int], *, card: ModelCard, caller: CallerIdentity
) -> bytes:
    """What must be the same for a stream to go on: everything that the caller asked, of whom, and who asked."""
    asked = GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("resume")
    parts = (
        asked.SerializeToString(deterministic=True),
        np.asarray(prompt_ids, "<i4").tobytes(),
        card.name.encode(),
        card.weights_fingerprint.encode(),
        card.tokenizer_fingerprint.encode(),
        caller.name.encode(),
    )
    sized = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(sized, digest_size=_DIGEST_BYTES).digest()


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line in hexadecimal; lines that begin with # are not keys.

    Raises:
        InvalidRequest: the file cannot be read, holds no key, or one that is too short.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        keys = tuple(bytes.fromhex(line) for line in lines if line.strip() and not line.startswith("#"))
    except (OSError, ValueError) as error:  # neither says what the file holds
        kind = type(error).__name__
        message = f"resume_key_file cannot be used ({kind}): one key a line, in hexadecimal"
        raise InvalidRequest(message, field="resume_key_file") from None
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        message = f"resume_key_file holds no key, or one of less than {MIN_KEY_BYTES} bytes"
        raise InvalidRequest(message, field="resume_key_file")
    return keys


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_KEY_ID_BYTES, person=b"resume key id").digest()


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")
