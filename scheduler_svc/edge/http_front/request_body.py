"""The body of a call, within limits of type, size and time. Knows nothing of what it holds."""

import asyncio

from aiohttp import web

from protos.wire.errors import MessageTooLarge, RequestAborted
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from scheduler_svc.edge.http_front.http_errors import HttpRefusal, error_reply


async def json_body(request: web.Request, *, limit_s: float) -> bytes:
    """The bytes of a body that says it is JSON; nothing is read of one that is refused.

    Raises:
        HttpRefusal: another type or encoding, broken, or too slow.
        MessageTooLarge: over the byte cap of callers' messages.
        RequestAborted: the caller left.
    """
    if request.content_type != "application/json":
        message = f"the content type is {request.content_type!r}; send the body as application/json"
        raise HttpRefusal(web.HTTPUnsupportedMediaType.status_code, message, "unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        message = "a compressed body is not offered; send it as it is"
        raise HttpRefusal(web.HTTPUnsupportedMediaType.status_code, message, "unsupported_content_encoding")
    check_size(request)
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {limit_s:g} s"
        raise HttpRefusal(web.HTTPRequestTimeout.status_code, message, "request_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise MessageTooLarge(f"the body has more than {MAX_CALLER_MESSAGE_BYTES} bytes, the limit") from None
    except web.RequestPayloadError:
        raise HttpRefusal(web.HTTPBadRequest.status_code, "the body is broken", "broken_body") from None
    except ConnectionError as error:
        raise RequestAborted("the caller left") from error


def check_size(request: web.Request) -> None:
    """Refuse a body by the size it says it has.

    Raises:
        MessageTooLarge: over the cap.
    """
    size = request.content_length
    if size is not None and size > MAX_CALLER_MESSAGE_BYTES:
        raise MessageTooLarge(f"the body has {size} bytes; the limit is {MAX_CALLER_MESSAGE_BYTES}")


async def continue_if_small(request: web.Request) -> web.StreamResponse | None:
    """Answer a caller that asks before it sends its body: go on, or the refusal."""
    try:
        check_size(request)
    except MessageTooLarge as error:
        return error_reply(error).response()
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None
