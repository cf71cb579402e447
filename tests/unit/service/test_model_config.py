import numpy as np
import pytest

from protos.service.model_config import read_model_config
from protos.wire.errors import EngineError, InvalidModelFile, UnsupportedFeature

GOOD = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 80,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
}


def read(**changes):
    found = GOOD | {f"llama.{key}": value for key, value in changes.items()}
    return read_model_config({key: value for key, value in found.items() if value is not None}, vocab_size=300)


def test_reads_shapes_and_derives_the_head_size():
    config = read()
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 48, 80)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert (config.vocab_size, config.context_tokens) == (300, 64)
    assert (config.norm_epsilon, config.rope.base) == (1e-5, 5000.0)


def test_defaults_of_what_a_file_may_leave_out():
    config = read(**{"attention.head_count_kv": None, "rope.freq_base": None, "attention.key_length": 32})
    assert (config.num_kv_heads, config.rope.base, config.head_dim) == (6, 10_000.0, 32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "llama.block_count is missing, must be an integer from 1 to 512"),
        ("block_count", 0, "is 0, must be 1 to 512"),
        ("block_count", 513, "is 513"),
        ("block_count", True, "must be an integer"),
        ("block_count", 2.0, "must be an integer"),
        ("block_count", "x" * 9999, "must be an integer"),
        ("embedding_length", 1 << 40, "must be 1 to"),
        ("attention.head_count_kv", 4, "does not divide 6 heads"),
        ("attention.key_length", 7, "is 7, must be even"),
        ("attention.value_length", 16, "only the key length 8"),
        ("rope.dimension_count", 4, "only the key length 8"),
        ("attention.layer_norm_rms_epsilon", None, "must be a number above 0"),
        ("attention.layer_norm_rms_epsilon", 0.0, "must be a number above 0"),
        ("rope.freq_base", float("nan"), "must be a number above 0"),
        ("rope.freq_base", float("inf"), "must be a number above 0"),
        ("context_length", -1, "is -1"),
    ],
)
def test_a_bad_number_is_refused_with_its_limit(key, value, message):
    with pytest.raises(InvalidModelFile, match=message) as caught:
        read(**{key: value})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("expert_count", 8),
        ("attention.sliding_window", 4096),
    ],
)
def test_what_no_layer_computes_is_refused_and_not_ignored(key, value):
    with pytest.raises(UnsupportedFeature, match=key):
        read(**{key: value})


GEMMA = {key.replace("llama.", "gemma3."): value for key, value in GOOD.items()} | {
    "general.architecture": "gemma3",
    "gemma3.attention.sliding_window": 32,
    "gemma3.block_count": 12,
}


def read_gemma(**changes):
    found = GEMMA | {f"gemma3.{key}": value for key, value in changes.items()}
    return read_model_config({key: value for key, value in found.items() if value is not None}, vocab_size=300)


def test_gemmas_layers_have_a_window_but_for_every_sixth():
    config = read_gemma()
    assert config.layer_windows == (32, 32, 32, 32, 32, 0) * 2
    assert (config.rope.base, config.rope.window_base, config.rope.stretch) == (5000.0, 10_000.0, 1.0)
    assert config.query_scale == 8**-0.5
    assert not config.rope.is_interleaved


def test_a_file_may_say_which_layers_have_windows():
    assert read_gemma(**{"attention.sliding_window_pattern": 2}).layer_windows == (32, 0) * 6
    flags = np.array([True] * 11 + [False])
    assert read_gemma(**{"attention.sliding_window_pattern": flags}).layer_windows == (32,) * 11 + (0,)


def test_larger_gemmas_stretch_positions_and_the_largest_scales_queries_by_its_hidden_size():
    config = read_gemma(**{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 20_000.0})
    assert (config.rope.stretch, config.rope.window_base) == (8.0, 20_000.0)
    largest = read_gemma(block_count=62, **{"attention.key_length": 16})
    assert largest.query_scale == (48 / 6) ** -0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", None),
        ("attention.sliding_window", 0),
        ("attention.sliding_window_pattern", 0),
        ("rope.freq_base_swa", -1.0),
    ],
)
def test_gemmas_bad_numbers_are_refused(key, value):
    with pytest.raises(InvalidModelFile, match=key):
        read_gemma(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("rope.scaling.type", "yarn"), ("attn_logit_softcapping", 50.0), ("rope.scaling.factor", 2.0)]
)
def test_what_gemmas_layers_do_not_compute_is_refused(key, value):
    with pytest.raises(UnsupportedFeature, match=key):
        read_gemma(**{key: value})


def test_an_architecture_must_be_named():
    with pytest.raises(EngineError, match=r"general\.architecture"):
        read_model_config({}, vocab_size=3)
