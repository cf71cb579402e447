"""Weights, pools, translator, canary, attention, runners: both stacks are built in this order, and any other raises."""

import pytest
import torch

from protos.wire.errors import InternalFault, InvalidRequest
from tests.support.model import model_folder
from tests.support.tiny_llama import tiny_folder
from worker_svc.numerics import numerics_by_name
from worker_svc.runners.build_order import BuildOrder, BuildStep
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.model_stack import ModelStack
from worker_svc.runners.native_stack import NativeStack
from worker_svc.runners.stack_settings import StackSettings

STEPS = (
    "load_weights",
    "make_pools",
    "make_translator",
    "make_canary",
    "bind_attention",
    "make_runners",
    "make_graphs",
)
SIZES = {"max_rows": 4, "max_tokens": 64, "num_pages": 8, "kv_canary": "refuse"}
SETTINGS = ExecutorSettings(**SIZES)
CPU = torch.device("cpu")


def torch_stack(**changes):
    settings = ExecutorSettings(numerics="reproducible", **(SIZES | changes))
    numerics = numerics_by_name("reproducible", dtype=torch.float32, device=CPU)
    return ModelStack(StackSettings(executor=settings, numerics=numerics, dtype=torch.float32, device=CPU))


def call(stack, name, folder):
    getattr(stack, name)(*((folder,) if name == "load_weights" else ()))


def build_and_try_every_wrong_step(stack, folder):
    for done in range(len(STEPS) + 1):
        for name in STEPS:
            if done < len(STEPS) and name == STEPS[done]:
                continue
            with pytest.raises(InternalFault, match="was to be built after"):
                call(stack, name, folder)
        if done < len(STEPS):
            call(stack, STEPS[done], folder)


@pytest.mark.parametrize("done", range(len(BuildStep)))
@pytest.mark.parametrize("step", list(BuildStep)[1:])
def test_only_the_next_step_may_be_entered(done, step):
    order = BuildOrder()
    for before in list(BuildStep)[1 : done + 1]:
        order.enter(before)
    if step == done + 1:
        order.enter(step)
        return
    with pytest.raises(InternalFault, match=step.name):
        order.enter(step)


def test_the_order_is_the_designs():
    names = [step.name for step in BuildStep]
    assert names == ["NOTHING", "WEIGHTS", "POOLS", "TRANSLATOR", "CANARY", "ATTENTION", "RUNNERS", "GRAPHS"]


def test_the_torch_stack_refuses_every_other_order(tmp_path):
    stack = torch_stack()
    build_and_try_every_wrong_step(stack, tiny_folder(tmp_path))
    assert [backend.pool for backend in stack.attention] == list(stack.pools) == list(stack.translator.pools)
    assert len(stack.canary.tables) == 1


@pytest.mark.model
def test_the_native_stack_refuses_every_other_order():
    stack = NativeStack(SETTINGS, threads=1)
    try:
        build_and_try_every_wrong_step(stack, model_folder())
        assert stack.translator.pools[0].geometry.num_pages == 8
    finally:
        stack.close()


@pytest.mark.model
def test_native_attention_on_other_pages_than_the_translators_fails_at_start():
    stack = NativeStack(SETTINGS, threads=1)
    try:
        for name in STEPS[:4]:
            call(stack, name, model_folder())
        stack.weights.reserve([9])
        with pytest.raises(InternalFault, match="bound to pages"):
            stack.bind_attention()
    finally:
        stack.close()


def test_a_step_that_failed_is_not_tried_again(tmp_path):
    stack = torch_stack(num_pages=1)
    stack.load_weights(tiny_folder(tmp_path))
    with pytest.raises(InvalidRequest):
        stack.make_pools()
    for name in ("make_pools", "load_weights"):
        with pytest.raises(InternalFault):
            call(stack, name, None)
