"""Every setting of the worker can be set, and what contradicts itself is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protos.service.config import ConfigError, load_config
from tests.support.code_measures import ROOT
from worker_svc.app import setting_problems
from worker_svc.config import ExecutorConfig, WorkerConfig
from worker_svc.setting_rules import combination_problems

OTHERS = {
    "host": "0.0.0.0",
    "port": "1234",
    "health_port": "1235",
    "load_timeout_s": "3.5",
    "drain_timeout_s": "4.5",
    "model": "gemma3-270m",
    "model_cache": "/models",
    "device": "simulated",
    "numerics": "reproducible",
    "kernels": "torch",
    "prefill_attention": "tiled",
    "decode_attention": "native",
    "dtype": "bfloat16",
    "kv_bytes": "1000000",
    "num_pages": "99",
    "memory_fraction": "0.5",
    "graph": "decode",
    "decode_graph_backend": "breakable",
    "prefill_graph_backend": "full",
    "decode_buckets": "1,2,7",
    "prefill_buckets": "64",
    "graph_slots": "9",
    "capture_wait_s": "2.5",
    "debug_graph": "True",
    "graph_memory_file": "/graphs.json",
    "kv_canary": "refuse",
    "page_size": "32",
    "max_rows": "8",
    "max_tokens": "128",
    "max_hidden_mode": "last",
    "capture_hidden_mode": "last",
    "window": "3",
    "threads": "3",
    "simulated_steps": "/steps.toml",
    "simulated_step_ms": "1.5",
    "simulated_eos_ratio": "0.25",
    "simulated_checks": "last",
    "metrics_host": "0.0.0.0",
    "metrics_port": "1236",
    "log_level": "debug",
    "log_format": "json",
    "histogram_buckets": "forward_seconds=1,2",
    "trace_endpoint": "http://collector:4317",
    "tls_dir": "/tls",
    "trust_domain": "example.org",
    "insecure": "True",
    "hardened": "True",
}
NEEDS = {"host": ("--insecure", "true")}
"""What else has to be set with it."""


def load(*arguments):
    return load_config(WorkerConfig, arguments=arguments, environment={}).value


def fields(*arguments):
    value = load(*arguments).model_dump(mode="json")
    return {name: setting for group in value.values() for name, setting in group.items()}


def test_every_setting_is_tried():
    assert set(fields()) == set(OTHERS)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_flag_changes_its_setting_and_no_other(name):
    before = fields(*NEEDS.get(name, ()))
    loaded = load(f"--{name.replace('_', '-')}", OTHERS[name], *NEEDS.get(name, ())).model_dump(mode="json")
    after = {key: setting for group in loaded.values() for key, setting in group.items()}
    assert {key for key in after if after[key] != before[key]} == {name}
    found = after[name]
    assert (",".join(map(str, found)) if isinstance(found, list) else str(found)) == OTHERS[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-bytes", "1000", "--num-pages", "9"),
        ("--kv-bytes", "1000", "--memory-fraction", "0.5"),
        ("--num-pages", "9", "--memory-fraction", "0.5"),
        ("--memory-fraction", "0"),
        ("--memory-fraction", "1.1"),
        ("--kv-canary", "sing"),
        ("--numerics", "reproducible", "--dtype", "bfloat16"),
        ("--capture-hidden-mode", "full", "--max-hidden-mode", "last"),
        ("--device", "tpu"),
        ("--graph", "some"),
        ("--decode-graph-backend", "magic"),
        ("--log-level", "loud"),
        ("--num-pages", "1"),
        ("--max-tokens", "0"),
        ("--port", "65536"),
    ],
)
def test_what_cannot_work_is_refused(arguments):
    with pytest.raises(ConfigError):
        load(*arguments)


def test_a_model_is_a_folder_or_a_name_in_the_cache(tmp_path):
    assert load("--model", "some-name").model.folder == Path("~/.cache/forwardplane/models").expanduser() / "some-name"
    assert load("--model", str(tmp_path)).model.folder == tmp_path


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--numerics reproducible --decode-attention torch", "decode_attention torch: its results depend on the batch"),
        ("--numerics reproducible --prefill-attention flashinfer", "prefill_attention flashinfer: it runs on cuda"),
        ("--numerics reproducible --prefill-attention tiled --decode-attention native", "need one attention back-end"),
        (
            "--numerics reproducible --prefill-attention native --page-size 8",
            "page_size is 8, prefill_attention native",
        ),
        ("--numerics reproducible --device cuda", "numerics reproducible needs device cpu, it is cuda"),
        ("--numerics reproducible --kernels native", "kernels native compute fast numerics, numerics is reproducible"),
        ("--kernels native --dtype bfloat16", "compute float32 on quantised weights, dtype is bfloat16"),
        ("--kernels native --page-size 32", "the native kernels have pages of 16 tokens, page_size is 32"),
        ("--kernels native --device cuda", "the native kernels are for the CPU, device is cuda"),
        (
            "--kernels native --decode-attention tiled",
            "the native kernels have their own attention, not tiled (auto, or kernels torch)",
        ),
        ("--decode-attention tiled --dtype bfloat16", "it computes float32, dtype is bfloat16"),
        ("--device cuda --decode-attention tiled", "decode_attention tiled: it runs on cpu, device is cuda"),
        ("--device cuda --prefill-attention flashinfer", "it computes bfloat16, float16, dtype is float32"),
        ("--decode-attention flashinfer", "decode_attention flashinfer: it runs on cuda, device is cpu"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(flags, problem):
    found = combination_problems(load(*flags.split()).executor)
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--numerics reproducible",
        "--numerics reproducible --prefill-attention native --decode-attention native",
        "--numerics reproducible --kernels torch --decode-attention tiled",
        "--prefill-attention torch --decode-attention native",
        "--dtype bfloat16 --page-size 8",
        "--device cuda --dtype bfloat16 --prefill-attention flashinfer",
        "--device cuda --page-size 32",
        "--device simulated --numerics reproducible --decode-attention torch",
    ],
)
def test_settings_that_work_together_are_not_refused(flags):
    assert combination_problems(load(*flags.split()).executor) == []


def test_a_gpu_is_looked_for_when_it_is_asked_for(monkeypatch):
    asked = load("--device", "cuda").executor
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [line.partition(",")[0] for line in setting_problems(asked)] == [
        "device = cuda: no CUDA device: the installed torch"
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert setting_problems(asked) == ["device = cuda: no CUDA device is found"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert setting_problems(asked) == []


def test_checking_settings_loads_no_torch():
    probe = "import sys, worker_svc.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0


def test_two_sizes_of_the_pools_are_refused_with_both_values():
    with pytest.raises(ValueError, match=r"memory_fraction 0\.5 and num_pages 100 exclude each other: give one"):
        ExecutorConfig(num_pages=100, memory_fraction=0.5)
