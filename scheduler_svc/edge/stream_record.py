"""Times and counts of one generation, for metrics and the request log. Never holds what was asked or answered."""

import logging

from protos.wire.enums import FinishReason
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.metrics import EdgeMetrics

logger = logging.getLogger(__name__)


class StreamRecord:
    """Made when a stream was admitted, closed when its call ends. Times are seconds on the event loop's clock."""

    def __init__(self, stream: CallerStream, metrics: EdgeMetrics, *, arrived: float) -> None:
        self._stream = stream
        self._metrics = metrics
        self._arrived = arrived
        self._first_wrote: float | None = None
        self._last_wrote = arrived
        self._num_first_ids = 0

    def wrote(self, num_ids: int, now: float) -> None:
        """A chunk with that many ids was given to the transport."""
        if self._first_wrote is None:
            self._first_wrote = now
            self._num_first_ids = num_ids
            self._metrics.first_token_seconds.observe(now - self._arrived)
        elif num_ids:
            self._metrics.inter_token_seconds.observe((now - self._last_wrote) / num_ids)
        self._last_wrote = now

    def close(self, now: float) -> None:
        """The call is over: one line in the log, and the counts of the whole."""
        usage = self._stream.usage
        if self._stream.names.sample_index == 0:
            self._metrics.prompt_tokens.observe(usage.prompt_tokens)
        self._metrics.output_tokens.observe(usage.output_tokens)
        names = self._stream.names
        self._metrics.tenant_used(
            names.caller.tenant_class,
            prompt_tokens=0 if names.sample_index else usage.prompt_tokens,
            output_tokens=usage.output_tokens,
        )
        num_later_ids = usage.output_tokens - self._num_first_ids
        if self._first_wrote is not None and num_later_ids > 0:
            self._metrics.output_token_seconds.observe((self._last_wrote - self._first_wrote) / num_later_ids)
        logger.info("request finished", extra=self._fields(now))

    def _fields(self, now: float) -> dict[str, object]:
        stream, usage = self._stream, self._stream.usage
        first_token_s = None if self._first_wrote is None else round(self._first_wrote - self._arrived, 4)
        return {
            "request_id": stream.names.request_id,
            "sample_index": stream.names.sample_index,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "finish_reason": FinishReason(stream.finish.reason).name if stream.finish is not None else "ERROR",
            "error_reason": stream.error.reason if stream.error is not None else None,
            "first_token_s": first_token_s,
            "duration_s": round(now - self._arrived, 4),
        }
