"""Memory -> whole pages of the KV pool. Pure; knows no device.

Guards: a pool that is granted holds its sink and at least one page, and a refusal says the smallest setting that works.
"""

from dataclasses import dataclass

from protos.wire.errors import InvalidRequest

MIN_PAGES = 2
"""The sink and one page."""
DEFAULT_MEMORY_SHARE = 0.25
"""Of the memory free after the weights, when no size is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the settings ask for. At most one of the two sizes; none: a share of the free memory."""

    kv_bytes: int | None = None
    num_pages: int | None = None
    free_bytes: int
    """Free after the weights were loaded."""
    useful_pages: int
    """Pages beyond which the worker's row and context limits leave nothing to gain."""


def pool_pages(request: PoolRequest, *, bytes_per_page: int) -> int:
    """Pages of the pool, the sink included.

    Raises:
        InvalidRequest: the setting is too small, or larger than the free memory; says the limit.
    """
    if request.kv_bytes is not None and request.num_pages is not None:
        raise InvalidRequest("kv_bytes and num_pages exclude each other: give one", field="kv_bytes")
    if request.num_pages is not None:
        return _checked(request.num_pages, request, field="num_pages", unit_bytes=bytes_per_page, unit=1)
    if request.kv_bytes is not None:
        pages = request.kv_bytes // bytes_per_page
        return _checked(pages, request, field="kv_bytes", unit_bytes=bytes_per_page, unit=bytes_per_page)
    share = int(request.free_bytes * DEFAULT_MEMORY_SHARE) // bytes_per_page
    if share < MIN_PAGES:
        least = int(MIN_PAGES * bytes_per_page / DEFAULT_MEMORY_SHARE)
        message = f"free memory is {request.free_bytes} bytes; the KV pool takes a quarter and needs {least} to be free"
        raise InvalidRequest(message, field="kv_bytes")
    return min(share, max(request.useful_pages, MIN_PAGES))


def _checked(pages: int, request: PoolRequest, *, field: str, unit_bytes: int, unit: int) -> int:
    given = request.num_pages if unit == 1 else request.kv_bytes
    if pages < MIN_PAGES:
        raise InvalidRequest(f"{field} is {given}, the smallest that works is {MIN_PAGES * unit}", field=field)
    if pages * unit_bytes > request.free_bytes:
        most = request.free_bytes // unit_bytes * unit
        raise InvalidRequest(f"{field} is {given}, the free memory allows at most {most}", field=field)
    return pages
