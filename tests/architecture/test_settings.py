"""Every setting of every process can be understood from `--help` alone."""

import importlib

import pytest

from protos.service.config import ConfigGroup, load_config
from protos.service.config_schema import help_text, setting_fields, setting_groups
from tests.support.code_measures import ROOT

SERVICES = ("scheduler_svc", "worker_svc")
MOST_SETTINGS = 68
UNITS_OF_NUMBERS = ("_s", "_ms", "_ratio", "_fraction", "_bytes", "_tokens")


@pytest.fixture(params=SERVICES)
def schema(request):
    """The one model in the service's `config.py` whose fields are groups."""
    assert (ROOT / request.param / "config.py").is_file(), f"{request.param} has no settings"
    models = vars(importlib.import_module(f"{request.param}.config")).values()
    (found,) = [
        item for item in models if isinstance(item, type) and issubclass(item, ConfigGroup) and _is_schema(item)
    ]
    return found


def _is_schema(model):
    annotations = [info.annotation for info in model.model_fields.values()]
    return bool(annotations) and all(isinstance(item, type) and issubclass(item, ConfigGroup) for item in annotations)


def test_every_setting_has_a_sentence_and_every_group_a_purpose(schema):
    for name, group in setting_groups(schema).items():
        assert group.__doc__, name
    for name, field in setting_fields(schema).items():
        assert field.info.description, name
        assert field.info.description.rstrip().endswith("."), name


def test_a_number_that_is_not_a_count_has_its_unit_in_its_name(schema):
    for name, field in setting_fields(schema).items():
        if field.info.annotation in (float, float | None):
            assert name.endswith(UNITS_OF_NUMBERS), name


def test_a_choice_is_an_enum_and_not_a_boolean(schema):
    switches = {name for name, field in setting_fields(schema).items() if field.info.annotation is bool}

    assert switches <= {"hardened", "insecure", "debug_graph"}


def test_defaults_stand_on_their_own_and_help_can_be_shown(schema):
    loaded = load_config(schema, environment={})

    assert set(loaded.sources.values()) == {"default"}
    assert "--log-level" in help_text(schema, program="x")


def test_settings_are_frozen_and_closed(schema):
    for model in (schema, *setting_groups(schema).values()):
        assert model.model_config["frozen"] is True, model
        assert model.model_config["extra"] == "forbid", model


def test_there_are_not_too_many_settings(schema):
    assert len(setting_fields(schema)) <= MOST_SETTINGS
