"""Histograms of one process as its `metrics.py` declares them: a table of settings gives their buckets."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from protos.service.histogram_buckets import BucketTable


@dataclass(frozen=True, slots=True)
class Histograms:
    """Makes them, registered."""

    prefix: str
    """Of every name."""
    registry: CollectorRegistry
    buckets: BucketTable

    def __call__(self, name: str, text: str, *labels: str) -> Histogram:
        """The histogram of that name, which is in the table."""
        return Histogram(self.prefix + name, text, labels, buckets=self.buckets[name], registry=self.registry)
