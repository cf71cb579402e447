"""Schema, generated code, frozen types and column tables say the same thing."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos.forwardplane.v1 import error_pb2, plan_pb2, sampling_pb2, worker_pb2
from protos.wire import columns, enums, errors, plan, result, worker_info
from protos.wire.codec_plan import OPTIONAL_GROUPS, RESERVED_GROUPS

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "protos" / "forwardplane" / "v1"
WITH_SERVICE = {"worker", "generate"}
TABLES = columns.PLAN_MESSAGES | columns.RESULT_MESSAGES
RESERVED_MESSAGES = {plan_pb2.ForwardPlan.DESCRIPTOR.fields_by_name[name].message_type.name for name in RESERVED_GROUPS}


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory):
    out = tmp_path_factory.mktemp("generated")
    schemas = sorted(path.relative_to(ROOT).as_posix() for path in SCHEMA.glob("*.proto"))
    services = [name for name in schemas if Path(name).stem in WITH_SERVICE]
    scripts = Path(sys.executable).parent
    base = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        ".",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
    ]
    for outputs in (
        [f"--python_out={out}", f"--mypy_out={out}", *schemas],
        [f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *services],
    ):
        subprocess.run([*base, *outputs], cwd=ROOT, check=True, capture_output=True, timeout=60)
    return out / SCHEMA.relative_to(ROOT)


def test_generated_code_is_fresh(regenerated):
    committed = {path.name: path.read_text() for path in SCHEMA.glob("*_pb2*.py*")}
    fresh = {path.name: path.read_text() for path in regenerated.glob("*_pb2*.py*")}
    assert set(fresh) == set(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


ENUMS = [
    (enums.ForwardMode, plan_pb2.ForwardMode, "FORWARD_MODE"),
    (enums.GraphPhase, plan_pb2.GraphPhase, "GRAPH_PHASE"),
    (enums.GraphRefusal, plan_pb2.GraphRefusal, "GRAPH_REFUSAL"),
    (enums.HiddenMode, plan_pb2.HiddenMode, "HIDDEN_MODE"),
    (enums.Feature, plan_pb2.Feature, "FEATURE"),
    (enums.RowStatus, plan_pb2.RowStatus, "ROW_STATUS"),
    (enums.RowFailure, plan_pb2.RowFailure, "ROW_FAILURE"),
    (enums.SubPoolKind, worker_pb2.SubPoolKind, "SUB_POOL_KIND"),
    (enums.WorkerState, worker_pb2.WorkerState, "WORKER_STATE"),
    (enums.FinishReason, sampling_pb2.FinishReason, "FINISH_REASON"),
]


@pytest.mark.parametrize(("ours", "theirs", "prefix"), ENUMS, ids=lambda value: getattr(value, "__name__", ""))
def test_enums_agree_name_for_name(ours, theirs, prefix):
    schema = dict(theirs.items())
    assert schema.pop(f"{prefix}_UNSPECIFIED") == 0
    assert {f"{prefix}_{member.name}": member.value for member in ours} == schema


def test_every_enum_of_the_schema_has_its_twin():
    named = {theirs.DESCRIPTOR.name for _, theirs, _ in ENUMS}
    schema = {name for module in (plan_pb2, worker_pb2, sampling_pb2) for name in module.DESCRIPTOR.enum_types_by_name}
    assert named == schema


def test_the_error_detail_knows_every_retry_and_blast():
    classes = list(subclasses(errors.EngineError))
    assert {f"RETRY_{cls.retry.upper()}" for cls in classes} <= set(error_pb2.Retry.keys())
    assert {f"BLAST_{cls.blast.upper()}" for cls in classes} <= set(error_pb2.Blast.keys())


def subclasses(cls):
    yield cls
    for child in cls.__subclasses__():
        yield from subclasses(child)


def bytes_fields(message):
    return {field.name for field in message.fields if field.type == FieldDescriptor.TYPE_BYTES}


def test_every_bytes_column_of_plan_and_result_is_in_the_codec_table():
    not_columns = {
        ("PlanIdentity", "incarnation"),
        ("PlanDelta", "base_digest"),
        ("PlanDelta", "digest"),
        ("ForwardResult", "plan_digest"),
    }
    for name, message in plan_pb2.DESCRIPTOR.message_types_by_name.items():
        if name in RESERVED_MESSAGES:
            continue
        expected = {field for field in bytes_fields(message) if (name, field) not in not_columns}
        assert {column.name for column in TABLES.get(name, ())} == expected, name


TYPE_NAMES = {
    "u8": columns.U8,
    "u32": columns.U32,
    "u64": columns.U64,
    "i32": columns.I32,
    "f32": columns.F32,
}


def documented_types(source, name):
    """Field -> element type, from the docstring below each field of a frozen type; `None` where it names none."""
    body = re.search(rf"class {name}:\n(.*?)(?=\n\n\n|\Z)", source, re.DOTALL).group(1)
    return {
        field: TYPE_NAMES.get(text.split(" ")[0].rstrip(":,"))
        for field, text in re.findall(r'^    (\w+): Array[^\n]*\n    """([^"]*)"""', body, re.MULTILINE)
    }


@pytest.mark.parametrize("name", TABLES)
def test_column_types_are_those_the_frozen_types_document(name):
    module = result if name in columns.RESULT_MESSAGES else plan
    documented = documented_types(Path(module.__file__).read_text(), name)
    assert documented == {column.name: column.dtype for column in TABLES[name]}


@pytest.mark.parametrize("name", TABLES)
def test_an_optional_column_is_one_whose_frozen_field_may_be_none(name):
    module = result if name in columns.RESULT_MESSAGES else plan
    fields = {field.name: field for field in dataclasses.fields(getattr(module, name))}
    for column in TABLES[name]:
        assert column.optional == (fields[column.name].default is None)
        assert not column.beside or column.beside in fields


def test_every_group_of_a_plan_is_read():
    schema = {field.name for field in plan_pb2.ForwardPlan.DESCRIPTOR.fields}
    frozen = {field.name for field in dataclasses.fields(plan.ForwardPlan)} - {"reserved"}
    assert schema == frozen | set(RESERVED_GROUPS)
    assert {name for name, _, _ in OPTIONAL_GROUPS} < frozen


FROZEN = {
    "PlanIdentity": plan.PlanIdentity,
    "GraphChoice": plan.GraphChoice,
    "WriteWindow": plan.WriteWindow,
    "PlanDelta": plan.PlanDelta,
    "PlanRejection": result.PlanRejection,
    "PlanTimings": result.PlanTimings,
    "ForwardResult": result.ForwardResult,
    "ResultHiddenStates": result.ResultHiddenStates,
    "WorkerLimits": worker_info.WorkerLimits,
    "Fingerprints": worker_info.Fingerprints,
    "SubPool": worker_info.SubPool,
    "BucketList": worker_info.Buckets,
    "AttachReply": worker_info.WorkerInfo,
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_types_have_the_fields_of_their_messages(name):
    module = worker_pb2 if name in worker_pb2.DESCRIPTOR.message_types_by_name else plan_pb2
    schema = {field.name for field in module.DESCRIPTOR.message_types_by_name[name].fields}
    assert {field.name for field in dataclasses.fields(FROZEN[name])} == schema


def test_every_enum_starts_at_unspecified():
    for module in (plan_pb2, worker_pb2, sampling_pb2, error_pb2):
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
