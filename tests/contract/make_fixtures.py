"""Writes the stored wire fixtures: at least one binary file per message between separately upgraded processes.

The messages of `bridge.proto` are not among them: both its sides are one build.

Run it (`python -m tests.contract.make_fixtures`) only after a change of the wire that `protos/CHANGELOG.md` records;
`--check` says which files would change. `.../fixtures/<package version>/<message>.<case>.bin`.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from protos.forwardplane.v1 import error_pb2, generate_pb2, plan_pb2, sampling_pb2, worker_pb2
from protos.wire.codec import checksum, encode_plan, encode_result, worker_info_to_proto
from protos.wire.delta_making import changes_of
from protos.wire.digest import plan_digest
from protos.wire.enums import GraphPhase, GraphRefusal
from protos.wire.plan import ForwardPlan, GraphChoice, Mask, MaskColumns, WriteWindow
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo
from tests.support import plans, results

FIXTURES = Path(__file__).parent / "fixtures" / "v1"


def plan_cases() -> dict[str, ForwardPlan]:
    """Plans that together use every field of the frozen form."""
    delta_base = plans.make_decode_plan(2)
    rows = [plans.decode(20), plans.decode(21), plans.decode(22)]
    windows = (WriteWindow(columns=(0, 1)), WriteWindow(run=(1, 2)), WriteWindow(flat_index=plans.u32(2)))
    forwards = tuple(
        plans.whole_forward(
            rows,
            row_begin=row,
            row_end=row + 1,
            write_window=window,
            layers=(row, row + 1),
            graph=GraphChoice(phase=GraphPhase.DECODE, bucket=1) if row else GraphRefusal.MASK,
        )
        for row, window in enumerate(windows)
    )
    later = plans.make_plan(rows, forwards=forwards, seq=3)
    for path, value in (
        ("rows.dp_ranks", plans.u32(0, 1, 0)),
        ("rows.length_source_seqs", plans.u64(0, 2, 0)),
        ("rows.length_source_rows", plans.u32(0, 1, 0)),
        ("tokens.ref_offsets", plans.u32(3)),
        ("masks", MaskColumns(masks=(Mask(allowed_ids=plans.u32()),), row_masks=plans.u32(0, 1, 0))),
    ):
        later = plans.with_value(later, path, value)
    return {
        "idle": plans.make_idle_plan(),
        "decode": plans.make_decode_plan(3),
        "mixed": plans.make_mixed_plan(),
        "rich": plans.make_rich_plan(plans.make_full_info(logits_width=50000)),
        "delta": plans.make_decode_plan(2, seq=2, delta=plans.make_delta(delta_base, digest=bytes(range(16)))),
        "delta-changes": _changes(),
        "later-rounds": later,
    }


def result_cases() -> dict[str, ForwardResult]:
    return {"rows": results.make_result(), "rejected": results.make_rejected_result()}


def info_cases() -> dict[str, WorkerInfo]:
    decode, prefill = plans.make_full_info().buckets
    captured = (replace(decode, live=(16,), dead=(8,), graph_bytes=1 << 33, capture_ms=1234), prefill)
    return {
        "plain": plans.make_info(),
        "full": plans.make_full_info(limits=plans.make_limits()),
        "hidden-states": plans.make_full_info(),
        "graphs": plans.make_info(buckets=captured),
    }


def fixtures() -> dict[str, bytes]:
    """File name -> content."""
    bodies: dict[str, bytes] = {}
    bodies |= {f"ForwardPlan.{name}": encode_plan(plan) for name, plan in plan_cases().items()}
    bodies |= {f"ForwardResult.{name}": encode_result(result) for name, result in result_cases().items()}
    bodies |= {f"AttachReply.{name}": _serialize(worker_info_to_proto(info)) for name, info in info_cases().items()}
    for message in (*_reserved_plan(), *_worker_messages(), *_generation_messages(), *_small_caller_messages()):
        bodies[f"{message.DESCRIPTOR.name}.plain"] = _serialize(message)
    bodies |= {f"{m.DESCRIPTOR.name}.{name}": _serialize(m) for name, m in _other_choices().items()}
    bodies |= {f"{message.DESCRIPTOR.name}.echo": _serialize(message) for message in _echo_messages()}
    bodies |= {f"{message.DESCRIPTOR.name}.prompt": _serialize(message) for message in _prompt_messages()}
    bodies |= {f"{message.DESCRIPTOR.name}.resume": _serialize(message) for message in _resume_messages()}
    return {f"{name}.bin": body for name, body in bodies.items()}


def _serialize(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _reserved_plan() -> list[Message]:
    """A plan with every group of the later rounds."""
    message = plan_pb2.ForwardPlan.FromString(encode_plan(plans.make_decode_plan(1)))
    message.parallel.dp_num_tokens = plans.u32(4, 5).tobytes()
    message.parallel.padding = 2
    message.speculation.draft_lens = plans.u32(3).tobytes()
    message.speculation.tree_mask = b"\7"
    message.speculation.parents = plans.i32(-1, 0, 1).tobytes()
    message.adapters.slots = plans.u32(1).tobytes()
    message.recurrent.state_slots = plans.u32(2).tobytes()
    message.recurrent.checkpoint_slots = plans.u32(0).tobytes()
    message.transfer.transfer_ids = plans.u64(9).tobytes()
    message.block_diffusion.block_offsets = plans.u32(1).tobytes()
    message.block_diffusion.max_steps = plans.u32(8).tobytes()
    return [message]


def _worker_messages() -> list[Message]:
    body = encode_plan(plans.make_decode_plan(1))
    result = encode_result(results.make_rejected_result())
    detail = error_pb2.ErrorDetail(
        reason="STALE_EPOCH",
        retry=error_pb2.RETRY_RESYNC,
        blast=error_pb2.BLAST_WORKER,
        error_id="e1",
        field="epoch",
        plan_seq=4,
        rows=[1, 2],
        highest_epoch=7,
        highest_term=0,
    )
    return [
        worker_pb2.AttachRequest(
            epoch=7, term=3, protocol_min=1, protocol_max=1, features=[1, 6], scheduler_name="scheduler-0"
        ),
        worker_pb2.ExecuteRequest(plan=worker_pb2.PlanMessage(body=body, crc32=checksum(body))),
        worker_pb2.ExecuteReply(result=worker_pb2.ResultMessage(body=result, crc32=checksum(result))),
        worker_pb2.ReportRequest(interval_ms=250),
        worker_pb2.WorkerReport(
            incarnation=plans.INCARNATION,
            epoch=7,
            term=3,
            state=worker_pb2.WORKER_STATE_SERVING,
            last_started_seq=5,
            last_finished_seq=4,
            device_counter=90,
            plan_age_ms=12,
            capture_budget_ms=100,
            nan_rows=1,
            canary_hits=2,
            resident_bytes=1 << 30,
            free_device_bytes=1 << 31,
            buckets=[worker_pb2.BucketList(phase=plan_pb2.GRAPH_PHASE_DECODE, sizes=[1, 2], live=[1])],
        ),
        worker_pb2.DrainRequest(reason="upgrade"),
        worker_pb2.DrainReply(state=worker_pb2.WORKER_STATE_DRAINING),
        detail,
    ]


def _resume_messages() -> list[Message]:
    held = generate_pb2.ResumedSample(
        ticket=b"\1ticket",
        token_ids=[5, 6],
        text_bytes=4,
        has_begun=True,
        prompt_logprobs=3,
        hidden_states=True,
    )
    return [
        generate_pb2.GenerateRequest(text="hi", resume=[held]),
        generate_pb2.GenerateChunk(request_id="r", resume_tickets=[b"\1ticket", b"\1other"]),
    ]


def _sampling() -> sampling_pb2.SamplingParameters:
    return sampling_pb2.SamplingParameters(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.0,
        seed=2**64 - 1,
        n=2,
    )


def _token_logprob() -> sampling_pb2.TokenLogprob:
    return sampling_pb2.TokenLogprob(token_id=5, logprob=-0.5, top=[sampling_pb2.TopLogprob(token_id=6, logprob=-1.5)])


def _usage() -> sampling_pb2.Usage:
    return sampling_pb2.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=2)


def _generation_messages() -> list[Message]:
    finish = sampling_pb2.Finish(reason=sampling_pb2.FINISH_REASON_STOP, stop_token_id=2)
    usage = _usage()
    chat = generate_pb2.ChatPrompt(messages=[generate_pb2.ChatMessage(role="user", content="hé")])
    request = generate_pb2.GenerateRequest(
        chat=chat,
        sampling=_sampling(),
        stop=sampling_pb2.StopParameters(
            max_tokens=9, min_tokens=0, stop_strings=["\n"], stop_token_ids=[2], ignore_eos=False
        ),
        model="m",
        client_tag="tag",
        logprobs=0,
        keep_special_tokens=True,
    )
    generation = generate_pb2.Generation(
        request_id="r",
        client_tag="tag",
        token_ids=[5],
        text="x",
        logprobs=[_token_logprob()],
        finish=finish,
        usage=usage,
        seed=1,
    )
    return [
        request,
        generate_pb2.GenerateChunk(
            request_id="r",
            client_tag="tag",
            sample_index=1,
            first_pos=2,
            token_ids=[5],
            text="x",
            text_offset=4,
            logprobs=[_token_logprob()],
            finish=finish,
            usage=usage,
            seed=0,
        ),
        generate_pb2.GenerateOnceRequest(requests=[request]),
        generate_pb2.GenerateOnceReply(generations=[generation]),
    ]


def _echo_messages() -> list[Message]:
    """Added after the first release."""
    return [
        generate_pb2.GenerateRequest(text="x", echo=True),
        generate_pb2.GenerateChunk(prompt_text="x"),
        generate_pb2.Generation(prompt_text=""),
    ]


def _prompt_messages() -> list[Message]:
    """Log-probabilities and hidden states of prompts: added after the first release."""
    states = generate_pb2.HiddenStates(dtype="float32", hidden_size=1, first_pos=2, states=bytes(4))
    answered: dict[str, Any] = {
        "prompt_logprobs": [_token_logprob()],
        "prompt_first_pos": 1,
        "hidden_states": states,
    }
    return [
        generate_pb2.GenerateRequest(
            text="x",
            prompt_logprobs=generate_pb2.PromptLogprobOptions(top=5, start=2),
            hidden_states=generate_pb2.HIDDEN_STATE_SELECTION_FULL,
        ),
        generate_pb2.GenerateChunk(**answered),
        generate_pb2.Generation(**answered),
        generate_pb2.EmbedRequest(pooling="mean", normalize=False),
    ]


def _small_caller_messages() -> list[Message]:
    return [
        generate_pb2.AbortRequest(request_id="r"),
        generate_pb2.AbortReply(),
        generate_pb2.TokenizeRequest(text="x"),
        generate_pb2.TokenizeReply(token_ids=[5]),
        generate_pb2.DetokenizeRequest(token_ids=[5], keep_special_tokens=False),
        generate_pb2.DetokenizeReply(text="x"),
        generate_pb2.EmbedRequest(requests=[generate_pb2.GenerateRequest(text="x")], pooling="last"),
        generate_pb2.EmbedReply(embeddings=[generate_pb2.Embedding(values=[0.5], usage=_usage())]),
        generate_pb2.GetModelRequest(),
        generate_pb2.GetModelReply(
            name="m",
            context_tokens=1,
            vocab_size=2,
            logits_width=3,
            eos_token_ids=[2],
            has_chat_template=True,
            dtype="float32",
            numerics="fast",
            version="0.1.0",
        ),
        generate_pb2.GetLoadRequest(),
        generate_pb2.GetLoadReply(requests_running=1, requests_waiting=2, kv_usage=0.5, workers=[_worker_load()]),
        generate_pb2.FlushCacheRequest(),
        generate_pb2.FlushCacheReply(freed_pages=3),
    ]


def _worker_load() -> generate_pb2.WorkerLoad:
    return generate_pb2.WorkerLoad(
        name="127.0.0.1:50100",
        state=worker_pb2.WORKER_STATE_SERVING,
        device="cpu",
        dtype="float32",
        numerics="fast",
        kernels="torch",
        requests_running=1,
        pages=2,
        pages_used=3,
        plans_in_flight=4,
        plans=5,
        plan_rows=6,
        plan_bytes=7,
        graph_replays=8,
        graph_misses=9,
        padded_tokens=10,
    )


def _graph_use() -> generate_pb2.GraphUse:
    use = generate_pb2.GraphUse(live=12, dead=13, planned=26, graph_bytes=14, capture_ms=15)
    use.phase = plan_pb2.GRAPH_PHASE_DECODE
    use.replays, use.real_tokens, use.padded_tokens = 8, 11, 10
    use.misses.add(reason=plan_pb2.GRAPH_REFUSAL_OVER_MAX_ROWS, count=9)
    return use


def _other_choices() -> dict[str, Message]:
    """The other choices of each `oneof`, by name."""
    return {
        "text": generate_pb2.GenerateRequest(text="x"),
        "scheduling": generate_pb2.GenerateRequest(text="x", cache_salt="tenant", priority=-3),
        "tokens": generate_pb2.GenerateRequest(tokens=generate_pb2.TokenPrompt(ids=[-1, 5, 2**40])),
        "chat": generate_pb2.TokenizeRequest(chat=generate_pb2.ChatPrompt()),
        "rules": generate_pb2.GenerateRequest(
            sampling=sampling_pb2.SamplingParameters(
                logit_bias={5: -1.5}, allowed_token_ids=[5, -1], banned_token_ids=[2**40]
            ),
            json_schema='{"type": "object"}',
        ),
        "regex": generate_pb2.GenerateRequest(regex="[a-z]+"),
        "ebnf": generate_pb2.GenerateRequest(ebnf='start: "a"'),
        "choice": generate_pb2.GenerateRequest(choice=generate_pb2.ChoiceList(texts=["yes", "no"])),
        "sample": generate_pb2.Generation(request_id="r", sample_index=3),
        "string": sampling_pb2.Finish(reason=sampling_pb2.FINISH_REASON_STOP, stop_string="END"),
        "open": worker_pb2.ExecuteRequest(
            open=worker_pb2.ExecuteOpen(epoch=7, term=3, incarnation=plans.INCARNATION, stream_number=2)
        ),
        "need_full": worker_pb2.ExecuteReply(need_full=worker_pb2.NeedFull(seq=5)),
        "gap": worker_pb2.ExecuteReply(gap=worker_pb2.Gap(expected_seq=4, received_seq=6)),
        "stale": worker_pb2.ExecuteReply(stale=worker_pb2.Stale(seq=2, expected_seq=4)),
        "opened": worker_pb2.ExecuteReply(opened=worker_pb2.Opened(expected_seq=4)),
        "graphs": generate_pb2.WorkerLoad(graphs=[_graph_use()]),
        "drain": worker_pb2.ExecuteReply(drain=worker_pb2.DrainNotice(reason="shutdown")),
    }


def _changes() -> ForwardPlan:
    """A rich plan as the changes of the one before it: one row in full, the others from their base rows."""
    info = plans.make_full_info()
    base, plan = plans.make_rich_plan(info, seq=8), plans.make_rich_plan(info, seq=9)
    plan = plans.with_element(plan, "rows.attempts", 1, 77)
    changes = changes_of(
        plan,
        base,
        digest=plan_digest(plan),
        base_digest=plan_digest(base),
        page_sizes=[pool.page_size for pool in info.sub_pools],
    )
    assert changes is not None
    return changes


def main(argv: list[str], say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description="Write the stored wire fixtures.")
    parser.add_argument("--check", action="store_true", help="only say which files would change")
    options = parser.parse_args(argv)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    wanted = fixtures()
    changed = {
        name
        for name, body in wanted.items()
        if not (FIXTURES / name).exists() or (FIXTURES / name).read_bytes() != body
    }
    for name in sorted(changed):
        say(f"changes: {name}")
        if not options.check:
            (FIXTURES / name).write_bytes(wanted[name])
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
