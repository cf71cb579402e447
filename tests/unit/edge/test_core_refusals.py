"""What the core says of a request's grammar is told by the field that holds it, with the place in its call."""

import pytest

from protos.wire.errors import EngineError, InvalidRequest, QueueFull
from scheduler_svc.edge.core_refusals import told_to_caller


@pytest.mark.parametrize("place", ["", "requests[3]."])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "choice"])
def test_a_grammar_goes_by_the_callers_field_in_field_and_message(kind: str, place: str) -> None:
    told = told_to_caller(InvalidRequest("grammar is too deep", field="grammar"), place=place, grammar=kind)
    assert (told.field, told.message) == (f"{place}{kind}", f"{place}{kind} is too deep")


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (InvalidRequest("sampling leaves nothing", field="sampling"), "requests[0].sampling", "requests[0].sampling"),
        (InvalidRequest("nothing is left", field="sampling"), "requests[0].sampling", "nothing is left"),
        (QueueFull("deadline is near", field="deadline"), "deadline", "deadline is near"),
    ],
)
def test_only_what_is_about_the_callers_message_has_a_place(error: EngineError, field: str, message: str) -> None:
    told = told_to_caller(error, place="requests[0].", grammar=None)
    assert told.field == field
    assert told.message.startswith(message)
