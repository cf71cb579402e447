"""Which attention back-ends a worker uses, from its settings and what is there. Pure; builds nothing, knows no torch.

Guards: the pair that is chosen shares page sizes and an order of the pool, keeps the promise of the numerics, and runs
on this device; what cannot work is refused by the name of its setting, and what `auto` passes over is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protos.wire.errors import UnsupportedFeature
from worker_svc.kv.kv_order import KVOrder

AUTO = "auto"
_ALL_ORDERS = tuple(KVOrder)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """What a back-end can work with. `None`: anything."""

    devices: frozenset[str]
    orders: tuple[KVOrder, ...]
    """Of the pool it reads, the one it prefers first."""
    keeps_bits: bool
    """A row has the same bits in any batch and any chunking."""
    page_sizes: frozenset[int] | None = None
    head_dims: frozenset[int] | None = None
    dtypes: frozenset[str] | None = None
    """Of queries, keys and values."""
    kv_dtype: str | None = None
    """That it wants pages to have where numerics allow it; `None`: that of keys and values."""


TRAITS: Mapping[str, BackendTraits] = MappingProxyType(
    {
        "torch": BackendTraits(devices=frozenset({"cpu", "cuda"}), orders=_ALL_ORDERS, keeps_bits=False),
        "tiled": BackendTraits(
            devices=frozenset({"cpu"}), orders=_ALL_ORDERS, keeps_bits=True, dtypes=frozenset({"float32"})
        ),
        "native": BackendTraits(
            devices=frozenset({"cpu"}),
            orders=(KVOrder.NATIVE,),
            keeps_bits=True,
            page_sizes=frozenset({16}),
            head_dims=frozenset(range(32, 513, 32)),
            kv_dtype="float16",
        ),
        "flashinfer": BackendTraits(
            devices=frozenset({"cuda"}),
            orders=(KVOrder.NHD, KVOrder.HND),
            keeps_bits=False,
            head_dims=frozenset({64, 128, 256}),
            dtypes=frozenset({"float16", "bfloat16"}),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """What settings and model ask for."""

    prefill: str = AUTO
    decode: str = AUTO
    reproducible: bool = False
    """A row's bits may depend on nothing but its own tokens."""
    plain: bool = False
    """Nothing but torch is wanted where the choice is ours."""
    device: str
    dtype: str
    page_size: int
    head_dim: int | None = None
    """None: not known yet."""

    def candidates(self) -> tuple[str, ...]:
        """What `auto` tries, best first. The last one works on every model."""
        if self.reproducible:
            return ("tiled",)
        if self.plain:
            return ("torch",)
        if self.device == "cpu":
            return ("native", "torch") if self.dtype == "float32" else ("torch",)
        return ("flashinfer", "torch")

    def possible(self) -> frozenset[str]:
        """Every back-end of this device that may come of it: what is worth being looked for."""
        asked = {self.prefill, self.decode}
        named = (asked - {AUTO}) | (set(self.candidates()) if AUTO in asked else set())
        return frozenset(name for name in named if name in TRAITS and self.device in TRAITS[name].devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """What is used, and what the pool must look like for it."""

    prefill: str
    decode: str
    order: KVOrder
    kv_dtype: str
    reasons: tuple[str, ...] = ()
    """What `auto` passed over, and why."""

    def uses(self, name: str) -> bool:
        """Whether either side is that back-end."""
        return name in (self.prefill, self.decode)

    def describe(self) -> str:
        """For people."""
        if self.prefill == self.decode:
            return f"{self.prefill} attention"
        return f"{self.prefill} prefill and {self.decode} decode attention"


def choose_attention(request: AttentionRequest, absent: Mapping[str, str]) -> AttentionChoice:
    """The pair of back-ends and the pool's form.

    Args:
        request: what is asked for.
        absent: why a back-end cannot be had on this machine, by name.

    Raises:
        UnsupportedFeature: a named back-end cannot work; names the setting, the value and what is possible.
    """
    for setting, name in (("prefill_attention", request.prefill), ("decode_attention", request.decode)):
        if name != AUTO:
            _check_named(setting, name, request, absent)
    reasons: list[str] = []
    prefill, decode = request.prefill, request.decode
    if prefill == AUTO:
        prefill = _automatic("prefill", request, absent, partner=decode, reasons=reasons)
    if decode == AUTO:
        decode = _automatic("decode", request, absent, partner=prefill, reasons=reasons)
    order = _common_order(prefill, decode)
    if order is None:
        message = f"prefill_attention {prefill} and decode_attention {decode} cannot share a KV pool"
        raise UnsupportedFeature(message, field="decode_attention")
    if request.reproducible and prefill != decode:
        message = (
            f"reproducible numerics need one attention back-end, not {prefill} for prefill and {decode} for decode"
        )
        raise UnsupportedFeature(message, field="decode_attention")
    return AttentionChoice(
        prefill=prefill,
        decode=decode,
        order=order,
        kv_dtype=_kv_dtype(request, (prefill, decode)),
        reasons=tuple(reasons),
    )


def _check_named(setting: str, name: str, request: AttentionRequest, absent: Mapping[str, str]) -> None:
    traits = TRAITS.get(name)
    if traits is None:
        message = f"{setting} is {name!r}, known: {', '.join((AUTO, *sorted(TRAITS)))}"
        raise UnsupportedFeature(message, field=setting)
    if traits.page_sizes is not None and request.page_size not in traits.page_sizes:
        legal = ", ".join(map(str, sorted(traits.page_sizes)))
        message = f"page_size is {request.page_size}, {setting} {name} works with: {legal}"
        raise UnsupportedFeature(message, field="page_size")
    problem = _problem(name, request, absent)
    if problem is not None:
        raise UnsupportedFeature(f"{setting} {name}: {problem}", field=setting)


def _problem(name: str, request: AttentionRequest, absent: Mapping[str, str]) -> str | None:
    traits = TRAITS[name]
    if request.device not in traits.devices:
        return f"it runs on {', '.join(sorted(traits.devices))}, device is {request.device}"
    if request.reproducible and not traits.keeps_bits:
        return "its results depend on the batch, numerics are reproducible"
    if traits.dtypes is not None and request.dtype not in traits.dtypes:
        return f"it computes {', '.join(sorted(traits.dtypes))}, dtype is {request.dtype}"
    if traits.page_sizes is not None and request.page_size not in traits.page_sizes:
        legal = ", ".join(map(str, sorted(traits.page_sizes)))
        return f"it works with pages of {legal} tokens, page_size is {request.page_size}"
    if traits.head_dims is not None and request.head_dim is not None and request.head_dim not in traits.head_dims:
        return f"it has no kernel for heads {request.head_dim} wide"
    return absent.get(name)


def _automatic(
    side: str, request: AttentionRequest, absent: Mapping[str, str], *, partner: str, reasons: list[str]
) -> str:
    candidates = (partner,) if request.reproducible and partner != AUTO else request.candidates()
    for name in candidates:
        problem = _problem(name, request, absent)
        if problem is None and partner != AUTO and _common_order(name, partner) is None:
            problem = f"it cannot share a KV pool with {partner}"
        if problem is None:
            return name
        reasons.append(f"{side} attention is not {name}: {problem}")
    raise UnsupportedFeature(f"no attention back-end works here; {'; '.join(reasons)}", field=f"{side}_attention")


def _common_order(prefill: str, decode: str) -> KVOrder | None:
    """The order that the choosier of the two prefers, if the other one reads it."""
    choosy, other = sorted((TRAITS[prefill].orders, TRAITS[decode].orders), key=len)
    return next((order for order in choosy if order in other), None)


def _kv_dtype(request: AttentionRequest, names: tuple[str, str]) -> str:
    if request.reproducible:
        return request.dtype
    wanted = (TRAITS[name].kv_dtype for name in names)
    return next((dtype for dtype in wanted if dtype is not None), request.dtype)
