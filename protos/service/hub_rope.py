"""How positions turn in a hub folder's `config.json`: bases and scaling, in the old form or the new one.

In the new form a model with two bases has them by kind of layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from protos.service.gguf_header import Value, shown
from protos.service.hub_values import integer, number, one_of
from protos.service.model_config import MAX_CONTEXT_TOKENS, MAX_NUMBER, RopeBands
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

_BANDED = "llama3"


def rope_metadata(config: Mapping[str, Any], *, has_windows: bool) -> dict[str, Value]:
    """Bases and linear scaling by GGUF's keys. `has_windows`: windowed layers have a base of their own.

    Raises:
        InvalidModelFile: a value is of the wrong kind.
        UnsupportedFeature: another scaling than the worker's layers compute.
    """
    given = _given(config)
    full = _of_full_layers(given)
    found = dict(_scaling(full, allowed=("default", "linear") if has_windows else ("default", "linear", _BANDED)))
    base = full.get("rope_theta", config.get("rope_theta"))
    if base is not None:
        found["rope.freq_base"] = float(number(base, "rope_theta"))
    if has_windows:
        windowed = _of_windowed_layers(given, config)
        if windowed.get("rope_theta") is not None:
            found["rope.freq_base_swa"] = float(number(windowed["rope_theta"], "rope_theta"))
            if dict(_scaling(windowed, allowed=("default", "linear"))):
                raise UnsupportedFeature("rope of windowed layers is scaled, supported: default", field="rope_type")
    return found


def rope_bands(config: Mapping[str, Any]) -> RopeBands | None:
    """Llama 3's scaling, if the config has it.

    Raises:
        InvalidModelFile: a value is missing or out of bounds.
    """
    full = _of_full_layers(_given(config))
    if _kind(full) != _BANDED:
        return None
    low, high = _positive(full, "low_freq_factor"), _positive(full, "high_freq_factor")
    if low >= high:
        message = f"low_freq_factor is {low:g}, must be below high_freq_factor, which is {high:g}"
        raise InvalidModelFile(message, field="low_freq_factor")
    key = "original_max_position_embeddings"
    first = full.get(key, config.get("max_position_embeddings"))
    return RopeBands(
        factor=_positive(full, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        first_context_tokens=integer(first, key, low=1, high=MAX_CONTEXT_TOKENS),
    )


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise InvalidModelFile(f"rope_parameters is {shown(given)}, must be an object", field="rope_parameters")
    return given


def _of_full_layers(given: Mapping[str, Any]) -> Mapping[str, Any]:
    by_kind = given.get("full_attention")
    return by_kind if isinstance(by_kind, dict) else given


def _of_windowed_layers(given: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(given.get("full_attention"), dict):
        return {"rope_theta": config.get("rope_local_base_freq")}
    windowed = given.get("sliding_attention")
    return windowed if isinstance(windowed, dict) else {}


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _scaling(parameters: Mapping[str, Any], *, allowed: tuple[str, ...]) -> Iterator[tuple[str, Value]]:
    kind = _kind(parameters)
    one_of(kind, "rope_type", allowed)
    if kind == "linear":
        yield "rope.scaling.type", "linear"
        yield "rope.scaling.factor", float(number(parameters.get("factor"), "factor"))


def _positive(parameters: Mapping[str, Any], key: str) -> float:
    value = number(parameters.get(key), key)
    if not 0 < value < MAX_NUMBER:
        raise InvalidModelFile(f"{key} is {shown(value)}, must be above 0 and below {MAX_NUMBER:g}", field=key)
    return float(value)
