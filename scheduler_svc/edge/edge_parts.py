"""What both doors of an edge serve with, the gRPC one and the HTTP one. Made by the edge's composition root."""

from dataclasses import dataclass
from importlib import metadata

from prometheus_client import CollectorRegistry

from protos.wire.enums import HiddenMode
from scheduler_svc.edge.admission import Admission
from scheduler_svc.edge.caller_door import CallerDoor, KnownCallers
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.edge_text import EdgeText
from scheduler_svc.edge.metrics import EdgeMetrics, create_edge_metrics
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.edge.resuming import ResumeDesk
from scheduler_svc.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerRights:
    """Who may call, and what callers may have."""

    known: KnownCallers
    resuming: ResumeDesk
    """With what they go on elsewhere."""
    max_hidden_mode: HiddenMode
    """Highest that they may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeParts:
    """One edge's, for as long as it runs."""

    link: CoreLink
    admission: Admission
    tokenizer: TextTokenizer
    encoder: PromptEncoder
    metrics: EdgeMetrics
    door: CallerDoor
    version: str

    @classmethod
    def joined(
        cls,
        link: CoreLink,
        text: EdgeText,
        registry: CollectorRegistry,
        *,
        rights: CallerRights,
    ) -> "EdgeParts":
        """The parts over one link and one text side; metrics are registered.

        Args:
            link: to the core.
            text: the text side.
            registry: takes the metrics.
            rights: of callers.
        """
        metrics = create_edge_metrics(registry)
        return cls(
            link=link,
            admission=Admission(
                link, text.tokenizer, text.encoder, resuming=rights.resuming, max_hidden_mode=rights.max_hidden_mode
            ),
            tokenizer=text.tokenizer,
            encoder=text.encoder,
            metrics=metrics,
            door=CallerDoor(metrics, link.quotas, rights.known),
            version=metadata.version("forwardplane"),
        )
