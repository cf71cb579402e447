"""What both doors of an edge serve with, the gRPC one and the HTTP one. Made by the edge's composition root."""

from dataclasses import dataclass
from importlib import metadata

from prometheus_client import CollectorRegistry

from protos.service.histogram_buckets import BucketTable
from protos.service.tracing import Tracing
from scheduler_svc.edge.admission import Admission
from scheduler_svc.edge.call_traces import CallTraces
from scheduler_svc.edge.caller_door import CallerDoor
from scheduler_svc.edge.caller_rights import CallerRights
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.edge_text import EdgeText
from scheduler_svc.edge.metrics import EdgeMetrics, create_edge_metrics
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeParts:
    """One edge's, for as long as it runs."""

    link: CoreLink
    admission: Admission
    tokenizer: TextTokenizer
    encoder: PromptEncoder
    metrics: EdgeMetrics
    door: CallerDoor
    traces: CallTraces
    version: str

    @classmethod
    def joined(
        cls,
        link: CoreLink,
        text: EdgeText,
        registry: CollectorRegistry,
        *,
        buckets: BucketTable,
        rights: CallerRights,
        tracing: Tracing | None = None,
    ) -> "EdgeParts":
        """The parts over one link and one text side; metrics are registered.

        Args:
            link: to the core.
            text: the text side.
            registry: takes the metrics.
            buckets: of their histograms.
            rights: of callers.
            tracing: of the calls; None: off.
        """
        metrics = create_edge_metrics(registry, buckets)
        return cls(
            link=link,
            admission=Admission(
                link, text.tokenizer, text.encoder, resuming=rights.resuming, max_hidden_mode=rights.max_hidden_mode
            ),
            tokenizer=text.tokenizer,
            encoder=text.encoder,
            metrics=metrics,
            door=CallerDoor(metrics, link.quotas, rights.known),
            traces=CallTraces(tracing, model=link.facts.card.name),
            version=metadata.version("forwardplane"),
        )
