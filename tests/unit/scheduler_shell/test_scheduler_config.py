from pathlib import Path

import pytest

from protos.service.config import ConfigError, load_config
from scheduler_svc.app import core_settings
from scheduler_svc.cluster_config import LeaseRole
from scheduler_svc.config import (
    CallerCertificates,
    CoreConfig,
    EpochSourceKind,
    LogFormat,
    LogLevel,
    Role,
    SchedulePolicy,
    SchedulerConfig,
)
from scheduler_svc.core.settings import CoreSettings

FLAGS = {
    "role": ("edge", Role.EDGE),
    "edges": ("3", 3),
    "edge_index": ("2", 2),
    "parent_fd": ("7", 7),
    "socket_dir": ("/tmp/x", Path("/tmp/x")),
    "drain_timeout_s": ("1.5", 1.5),
    "edge_restarts": ("0", 0),
    "model": ("gemma3-270m", "gemma3-270m"),
    "model_cache": ("/models", Path("/models")),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "health_port": ("1", 1),
    "http_port": ("8000", 8000),
    "edge_metrics_port": ("2", 2),
    "max_streams": ("9", 9),
    "max_hidden_mode": ("full", "full"),
    "budget_tokens": ("64", 64),
    "target_step_ms": ("80", 80.0),
    "schedule_policy": ("lpm", SchedulePolicy.LPM),
    "priority_aging_s": ("3", 3.0),
    "max_waiting_requests": ("5", 5),
    "first_new_token_ratio": ("0.8", 0.8),
    "least_new_token_ratio": ("0.2", 0.2),
    "new_token_ratio_decay_steps": ("50", 50),
    "grammar_processes": ("3", 3),
    "grammar_cpu_s": ("4", 4),
    "grammar_memory_bytes": ("100000000", 100_000_000),
    "grammar_cache_bytes": ("5", 5),
    "workers": ("a:1,b:2", ("a:1", "b:2")),
    "epoch_source": ("kubernetes", EpochSourceKind.KUBERNETES),
    "epoch_file": ("/var/epoch", Path("/var/epoch")),
    "epoch_object": ("epoch", "epoch"),
    "worker_service": ("workers", "workers"),
    "discovery_interval_s": ("5", 5.0),
    "cluster_url": ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
    "cluster_namespace": ("n", "n"),
    "cluster_timeout_s": ("9", 9.0),
    "lease_object": ("lease", "lease"),
    "lease_role": ("standby", LeaseRole.STANDBY),
    "lease_duration_s": ("6", 6),
    "attach_timeout_s": ("1", 1.0),
    "open_timeout_s": ("2", 2.0),
    "plan_timeout_s": ("3", 3.0),
    "report_interval_ms": ("100", 100),
    "report_late_s": ("0.5", 0.5),
    "report_lost_s": ("4", 4.0),
    "reattach_min_s": ("0.2", 0.2),
    "reattach_max_s": ("7", 7.0),
    "record": ("/tmp/record", Path("/tmp/record")),
    "record_bytes": ("4096", 4096),
    "record_files": ("9", 9),
    "metrics_host": ("0.0.0.0", "0.0.0.0"),
    "metrics_port": ("3", 3),
    "log_level": ("debug", LogLevel.DEBUG),
    "log_format": ("json", LogFormat.JSON),
    "trace_endpoint": ("http://collector:4317", "http://collector:4317"),
    "histogram_buckets": ("queue_seconds=1,2", "queue_seconds=1,2"),
    "trace_ratio": ("0.25", 0.25),
    "trace_plan_ratio": ("0.5", 0.5),
    "resume_key_file": ("/keys", Path("/keys")),
    "tls_dir": ("/tls", Path("/tls")),
    "trust_domain": ("example.org", "example.org"),
    "insecure": ("true", True),
    "hardened": ("true", True),
    "caller_tls_dir": ("/callers", Path("/callers")),
    "caller_certificates": ("required", CallerCertificates.REQUIRED),
    "callers": ("/callers.toml", Path("/callers.toml")),
}


def load(*arguments):
    return load_config(SchedulerConfig, arguments=arguments, environment={})


def test_every_setting_has_a_flag_that_changes_it():
    arguments = [part for name, (text, _) in FLAGS.items() for part in ("--" + name.replace("_", "-"), text)]
    loaded, defaults = load(*arguments), load()
    found, before = {}, {}
    for group in SchedulerConfig.model_fields:
        found |= {
            name: getattr(getattr(loaded.value, group), name)
            for name in type(getattr(loaded.value, group)).model_fields
        }
        before |= {
            name: getattr(getattr(defaults.value, group), name)
            for name in type(getattr(defaults.value, group)).model_fields
        }
    assert found == {name: value for name, (_, value) in FLAGS.items()}
    assert not [name for name in found if found[name] == before[name]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--workers", "a"), "workers"),
        (("--workers", "a:0"), "workers"),
        (("--workers", "a:70000"), "workers"),
        (("--workers", ":1"), "workers"),
        (("--workers", "a:1,a:1"), "twice"),
        (("--workers", ","), "no worker"),
        (("--epoch-source", "file"), "epoch_file"),
        (("--epoch-source", "kubernetes"), "epoch_object"),
        (("--lease-object", "x"), "epoch_source kubernetes"),
        (("--lease-duration-s", "0"), "lease_duration_s"),
        (("--role", "core"), "socket_dir"),
        (("--port", "65536"), "port"),
        (("--edges", "0"), "edges"),
        (("--drain-timeout-s", "nan"), "drain_timeout_s"),
        (("--log-level", "loud"), "log_level"),
        (("--histogram-buckets", "queue_seconds=2,1"), "histogram_buckets"),
        (("--first-new-token-ratio", "0.05"), "least_new_token_ratio"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        load(*arguments)


def test_what_two_settings_contradict_is_said_beside_what_is_wrong_by_itself():
    with pytest.raises(ConfigError) as raised:
        load("--port", "70000", "--report-late-s", "-1", "--epoch-source", "file", "--lease-object", "x")
    problems = "\n".join(raised.value.problems)
    for named in ("port = 70000", "report_late_s = -1", "epoch_source file needs epoch_file"):
        assert named in problems
    with pytest.raises(ConfigError) as raised:
        load("--port", "70000", "--host", "0.0.0.0", "--lease-object", "x", "--worker-service", "w")
    problems = "\n".join(raised.value.problems)
    for named in ("port = 70000", "host = 0.0.0.0", "set tls_dir", "lease_object needs epoch_source kubernetes"):
        assert named in problems


def test_a_model_is_a_folder_or_a_name_in_the_cache(tmp_path):
    named = load("--model", "some-model", "--model-cache", str(tmp_path)).value.model
    assert named.folder == tmp_path / "some-model"
    assert load("--model", str(tmp_path)).value.model.folder == tmp_path


def test_unset_core_settings_keep_the_cores_own_defaults():
    assert core_settings(CoreConfig()) == CoreSettings()
    assert core_settings(CoreConfig(budget_tokens=64, max_waiting_requests=3)) == CoreSettings(
        budget_tokens=64, max_waiting_requests=3
    )
    ratios = core_settings(CoreConfig(first_new_token_ratio=0.5, least_new_token_ratio=0.25))
    assert ratios == CoreSettings(new_token_ratio_start=0.5, new_token_ratio_floor=0.25)


def test_the_socket_lies_in_the_folder():
    config = load("--socket-dir", "/run/x").value
    assert config.process.socket_path.parent == Path("/run/x")
