"""Client channels with explicit limits. Knows no service of ours.

The plan channel notices a stopped peer within three seconds. The callers' port answers pings more often than every five
minutes with GOAWAY, so a caller's channel pings less often: a scheduler that vanished without a word is noticed late.
"""

import json
from collections.abc import Sequence

import grpc

from protos.service.credentials import ChannelSecurity
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES, MAX_PLAN_BYTES, MAX_RESULT_BYTES

CALLER_PING_MS = 320_000
"""Above the servers' `LEAST_PING_INTERVAL_MS`. Only while a call runs, and after so long without any answer."""
CALLER_PING_TIMEOUT_MS = 10_000
_PLAN_BYTES = max(MAX_PLAN_BYTES, MAX_RESULT_BYTES)

_PLAN_OPTIONS = (
    ("grpc.max_receive_message_length", _PLAN_BYTES),
    ("grpc.max_send_message_length", _PLAN_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)
_CALLER_OPTIONS = (
    # A scheduler that is started again is found at once: its callers have streams to go on with.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", CALLER_PING_MS),
    ("grpc.keepalive_timeout_ms", CALLER_PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", CALLER_PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_CALLER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_CALLER_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)
Options = tuple[tuple[str, str | int], ...]


def only_serving_options(service: str) -> Options:
    """Options by which a caller's channel uses only those addresses of its target whose health says `service` serves.

    The health of an address is asked on the callers' port, without a token.
    """
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return (("grpc.service_config", json.dumps(config)),)


def plan_channel(target: str, security: ChannelSecurity | None = None) -> grpc.aio.Channel:
    """A scheduler's own connection to one worker: never shared, never retried, never through a proxy."""
    return _aio_channel(target, _PLAN_OPTIONS, security)


def caller_channel(target: str, security: ChannelSecurity | None = None, *, options: Options = ()) -> grpc.aio.Channel:
    """A caller's connection to a scheduler, for asyncio. Of two equal options gRPC takes the first, given here."""
    return _aio_channel(target, (*options, *_CALLER_OPTIONS), security)


def sync_caller_channel(target: str, security: ChannelSecurity | None = None, *, options: Options = ()) -> grpc.Channel:
    """A caller's connection to a scheduler, without asyncio."""
    every = (*options, *_CALLER_OPTIONS)
    if security is None:
        return grpc.insecure_channel(target, options=every)
    return grpc.secure_channel(target, security.credentials, options=(*every, *_named(security)))


def _aio_channel(
    target: str, options: Sequence[tuple[str, str | int]], security: ChannelSecurity | None
) -> grpc.aio.Channel:
    if security is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, security.credentials, options=(*options, *_named(security)))


def _named(security: ChannelSecurity) -> tuple[tuple[str, str], ...]:
    """Options by which the server's certificate is held against a fixed name in place of the target's host."""
    return (("grpc.ssl_target_name_override", security.server_name),) if security.server_name else ()
