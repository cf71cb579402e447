"""Building, loading and the pool of threads: what is there is said, what is missing is said in one line."""

import ctypes
import importlib.util
import logging
import shutil
import time

import numpy as np
import pytest

from kernels import build, native_spec, native_types
from kernels import native as loading
from kernels.errors import KernelError, NativeUnavailable
from kernels.native import Native, ThreadPool, load_native
from kernels.native_ops import linear
from kernels.native_types import Variant
from tests.support.native_cases import Q4_1, raw_matrix


def test_the_structures_have_the_sizes_of_the_header(native):
    sizes = (ctypes.c_int64 * 5)()
    native.library.fp_struct_bytes(ctypes.byref(sizes))

    names = ("CLayerSpec", "CModelSpec", "CPages", "CStep", "CAttention")
    assert list(sizes) == [ctypes.sizeof(getattr(native_types, name)) for name in names]


def test_it_says_what_runs(native):
    assert native.describe(threads=2, variant=Variant.AVX2) == f"native avx2 {native.version} (2 threads)"
    assert native.describe(threads=1).endswith("(1 thread)")


def test_a_machine_without_avx2_is_told_so(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu sse2 fma f16c bmi1 bmi2 movbe\n")

    assert load_native(cpu_info=info) == NativeUnavailable("this CPU lacks avx2")


def test_a_machine_without_a_compiler_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)

    assert load_native(cache=tmp_path) == NativeUnavailable("no C++ compiler (g++, clang++, c++) is installed")


def test_a_folder_that_cannot_be_written_is_told_so(tmp_path):
    occupied = tmp_path / "file"
    occupied.touch()

    outcome = load_native(cache=occupied)

    assert isinstance(outcome, NativeUnavailable)
    assert outcome.reason.startswith("the library cannot be written: ")


def test_a_failing_compiler_leaves_one_line_and_no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))

    outcome = load_native(cache=tmp_path)

    assert isinstance(outcome, NativeUnavailable)
    assert outcome.reason.startswith("the compiler failed: ")
    assert "\n" not in outcome.reason
    assert not list(tmp_path.rglob("*.so"))


def test_an_install_without_the_library_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(loading, "SHIPPED", tmp_path / "lib.so")

    outcome = load_native()

    assert isinstance(outcome, NativeUnavailable)
    assert "without the native library" in outcome.reason


@pytest.mark.parametrize("has_sources", [False, True])
def test_a_wheel_uses_the_library_that_it_ships(native, monkeypatch, tmp_path, has_sources):
    if not has_sources:
        monkeypatch.setattr(loading, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(loading, "SHIPPED", native.path)
    monkeypatch.setattr(build, "find_compiler", lambda: None)

    assert load_native(cache=tmp_path).path == native.path


def test_a_wheels_library_is_for_an_old_glibc_where_the_compiler_for_that_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    portable = build.wheel_compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    own = build.wheel_compiler()

    assert "x86_64-linux-gnu.2.17" in portable.command
    assert portable.platform == "manylinux_2_17_x86_64"
    assert own == build.Compiler((build.find_compiler(),))
    assert own.platform is None
    assert portable.file_flags.keys() == own.file_flags.keys()


def test_a_broken_library_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(loading, "SHIPPED", tmp_path / build.LIBRARY)
    (tmp_path / build.LIBRARY).write_bytes(b"not a library")

    outcome = load_native()

    assert isinstance(outcome, NativeUnavailable)
    assert "cannot be loaded" in outcome.reason


@pytest.mark.parametrize("damage", [build.LIBRARY, build.CHECKSUM])
def test_a_damaged_library_in_the_cache_is_built_again_with_one_line(native, monkeypatch, tmp_path, caplog, damage):
    monkeypatch.setattr(build, "compile_library", lambda _, target: shutil.copy(native.path, target))
    whole = build.build_library(tmp_path)
    before = (whole.parent / damage).read_bytes()
    (whole.parent / damage).write_bytes(before[: len(before) // 2])

    with caplog.at_level(logging.WARNING, logger="kernels.build"):
        outcome = load_native(cache=tmp_path)
        again = load_native(cache=tmp_path)

    assert isinstance(outcome, Native)
    assert isinstance(again, Native)
    assert whole.read_bytes() == native.path.read_bytes()
    assert [record.library for record in caplog.records] == [str(whole)]


def test_the_library_sees_the_instructions_that_the_system_lists(native):
    flags = set(loading.CPU_INFO.read_text().split())

    assert native.supports(Variant.AVX2) == loading.NEEDED_FLAGS.issubset(flags)
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
    assert native.supports(Variant.AVX512_VNNI) == wide.issubset(flags)


def test_a_library_is_built_once(native):
    assert build.build_library() == native.path
    assert isinstance(load_native(), Native)


def test_the_fingerprint_follows_flags_and_compiler(monkeypatch):
    before = build.fingerprint("g++")
    monkeypatch.setattr(build, "BASELINE", "x86-64-v4")

    assert len({before, build.fingerprint("g++"), build.fingerprint("clang++")}) == 3


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_more_threads_than_cores_give_the_same_bits(native, threads):
    rng = np.random.default_rng(1)
    x, raw = rng.normal(size=(3, 64)).astype(np.float32), raw_matrix(rng, Q4_1, 2000, 64)
    with ThreadPool(native, threads=1) as pool:
        expected = linear(pool, x, raw, tensor_type=Q4_1, num_outputs=2000)
        pool.set_threads(threads)
        for _ in range(20):
            assert np.array_equal(linear(pool, x, raw, tensor_type=Q4_1, num_outputs=2000), expected)


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_a_thread_count_out_of_range_is_refused(native, threads):
    with pytest.raises(KernelError, match=f"threads is {threads}, must be 1 to 64"):
        ThreadPool(native, threads=threads)


def test_an_idle_pool_uses_no_processor_time(native):
    with ThreadPool(native, threads=4):
        time.sleep(0.01)
        spent = []
        for _ in range(5):
            before = time.process_time()
            time.sleep(0.03)
            spent.append(time.process_time() - before)
        assert min(spent) < 0.01


def test_a_pool_closes_twice(native):
    pool = ThreadPool(native, threads=3)
    pool.close()
    pool.close()


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100_000.0,
}


def test_the_spec_of_smollm2():
    spec = native_spec.spec_from_metadata(METADATA, vocab_size=49152)

    assert (spec.head_dim, spec.num_groups, len(spec.layers), spec.rope_interleaved) == (64, 1, 30, True)
    assert spec.bytes_per_page(0, 16) == 30 * 2 * 3 * 64 * 16 * 2


def test_the_spec_of_gemma():
    gemma = {key.replace("llama.", "gemma3."): value for key, value in METADATA.items()}
    gemma |= {
        "general.architecture": "gemma3",
        "gemma3.attention.sliding_window": 512,
        "gemma3.attention.key_length": 256,
    }

    spec = native_spec.spec_from_metadata(gemma, vocab_size=10)

    assert [index for index, layer in enumerate(spec.layers) if not layer.window] == [5, 11, 17, 23, 29]
    assert (spec.rope_thetas, spec.attention_scale, spec.num_groups) == ((100_000.0, 10_000.0), 1 / 16, 2)
    short = native_spec.spec_from_metadata({**gemma, "gemma3.block_count": 5}, vocab_size=10)
    assert {(layer.window, layer.group) for layer in short.layers} == {(512, 0)}, "all windowed: one sub-pool"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "bert"}, "architecture 'bert' has no native kernels"),
        ({"llama.block_count": None}, "llama.block_count is None, must be a number"),
        ({"llama.attention.head_count": "nine"}, "head_count is 'nine'"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(KernelError, match=message):
        native_spec.spec_from_metadata({**METADATA, **changes}, vocab_size=10)


def test_the_machine_has_ceilings(pool):
    ceilings = pool.ceilings()
    assert 1e8 < ceilings.read_bytes < 1e13
    assert 1e9 < ceilings.int8_operations < 1e15
