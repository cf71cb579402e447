"""What edges fill in for a missing max_tokens, and what the core admits, go by one figure, whatever the pools."""

from hypothesis import given
from hypothesis import strategies as st

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.bridge.convert import model_to_message
from scheduler_svc.core.admission import never_fits
from scheduler_svc.core.events import WorkerLost
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.validate_request import output_room
from scheduler_svc.observation import model_view
from tests.support.core_harness import CoreHarness, make_spec, small_info
from tests.support.edge_harness import tiny_card
from tests.support.plans import full_sub_pool, window_sub_pool

PAGE_SIZE = 4


def worker(full_pages: int, windows: list[tuple[int, int]], plans: int, context: int) -> WorkerInfo:
    windowed = [
        window_sub_pool(num_pages=pages, page_size=PAGE_SIZE, window_tokens=tokens) for pages, tokens in windows
    ]
    return small_info(
        sub_pools=(full_sub_pool(num_pages=full_pages, page_size=PAGE_SIZE), *windowed),
        window=plans,
        context_tokens=context,
    )


WORKERS = st.builds(
    worker,
    st.integers(2, 130),
    st.lists(st.tuples(st.integers(2, 90), st.sampled_from([1, 6, 32])), max_size=2),
    st.integers(1, 2),
    st.sampled_from([100, 400]),
)


def told(attached: list[WorkerInfo], known: list[WorkerInfo], settings: CoreSettings) -> ModelFacts:
    message = model_to_message(model_view(attached, known, settings))
    return model_facts(tiny_card(7), message, has_chat_template=False)


@given(
    infos=st.lists(WORKERS, min_size=1, max_size=2),
    budget=st.sampled_from([None, 4, 16, 64]),
    prompt=st.integers(1, 399),
    lost=st.sets(st.integers(0, 1)),
)
def test_without_max_tokens_a_prompt_that_fits_is_admitted(infos, budget, prompt, lost):
    settings = CoreSettings(budget_tokens=budget)
    harness = CoreHarness(settings)
    for index, info in enumerate(infos):
        harness.attach(f"w{index}", info)
    for index in lost & set(range(len(infos))):
        harness.step(WorkerLost(f"w{index}"))
    facts = told([info for index, info in enumerate(infos) if index not in lost], infos, settings)
    prompt = min(prompt, facts.capacity_tokens - 1, facts.context_tokens - 1)

    filled_in = output_room(prompt, pb.GenerateRequest(), facts)

    assert never_fits(harness.state, make_spec(1, prompt=prompt, max_tokens=filled_in)) is None


@given(info=WORKERS, budget=st.sampled_from([None, 4, 16, 64]))
def test_edges_are_told_what_the_core_admits_by_and_no_less(info, budget):
    settings = CoreSettings(budget_tokens=budget)
    harness = CoreHarness(settings)
    harness.attach(info=info)

    view = model_view([info], [info], settings)

    assert view.capacity_tokens == harness.state.known["w0"].capacity.tokens
    assert view.capacity_tokens == harness.state.workers["w0"].memory.capacity.tokens


@given(infos=st.lists(WORKERS, min_size=1, max_size=3), prompt=st.integers(1, 200), output=st.integers(0, 250))
def test_a_request_is_admitted_if_one_worker_could_hold_the_whole_of_it(infos, prompt, output):
    """Not if one has the context and another one the pages."""
    harness = CoreHarness(CoreSettings())
    for index, info in enumerate(infos):
        harness.attach(f"w{index}", info)
    spec = make_spec(1, prompt=prompt, max_tokens=output)

    error = never_fits(harness.state, spec)

    known = harness.state.known.values()
    total = prompt + output
    assert (error is None) == any(
        total <= each.info.limits.context_tokens and total <= each.capacity.tokens for each in known
    )
    if error is not None:
        assert str(total) in error.message
        assert error.field == ("max_tokens" if output else "prompt_ids")
        assert ("max_tokens" in error.message) == (output > 0)
