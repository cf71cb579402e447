"""Who may call an edge and what callers may have, made from the settings."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from protos.wire.enums import HiddenMode
from scheduler_svc.config import CallerCertificates, SchedulerConfig, SchedulerTlsConfig
from scheduler_svc.edge.caller_book import CallerBook
from scheduler_svc.edge.caller_door import KnownCallers
from scheduler_svc.edge.resume_tickets import TicketDesk, read_keys
from scheduler_svc.edge.resuming import ResumeDesk

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerRights:
    """Who may call, and what callers may have."""

    known: KnownCallers
    resuming: ResumeDesk
    """With what they go on elsewhere."""
    max_hidden_mode: HiddenMode
    """Highest that they may ask for."""


def caller_rights(config: SchedulerConfig) -> CallerRights:
    """As the settings say.

    Raises:
        InvalidRequest: the file of callers or that of keys cannot be used.
    """
    return CallerRights(
        known=_known_callers(config.tls),
        resuming=_resume_desk(config.resume.resume_key_file),
        max_hidden_mode=HiddenMode[config.edge.max_hidden_mode.name],
    )


def needs_certificate(tls: SchedulerTlsConfig) -> bool:
    """Callers without a certificate cannot connect."""
    return tls.caller_certificates is CallerCertificates.REQUIRED


def _known_callers(tls: SchedulerTlsConfig) -> KnownCallers:
    if tls.callers is not None:
        return KnownCallers(book=CallerBook(tls.callers, clock=time.monotonic))
    if needs_certificate(tls):
        return KnownCallers(certificate_domain=tls.trust_domain)
    if tls.caller_tls_dir is not None:
        _logger.warning("the callers' ports are encrypted, and everybody who reaches them may call: set callers")
    return KnownCallers()


def _resume_desk(path: Path | None) -> ResumeDesk:
    """Seals with the first key of the file."""
    if path is None:
        _logger.info("callers cannot resume their streams when this scheduler dies: set resume_key_file")
        return ResumeDesk(None)
    return ResumeDesk(TicketDesk(read_keys(path), unix_clock=time.time))
