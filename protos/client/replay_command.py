"""`forwardplane replay`: runs a recording again on a fresh worker's executor and shows where results differ.

Reads only the file's head; the run is a process of its own (`python -m worker_svc.replay`), which is not imported here.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from protos.client.exit_codes import FAILURE, OK
from protos.client.fetch_model import model_for_device
from protos.service.config import EX_CONFIG
from protos.service.lifecycle import ExitCode
from protos.service.plan_recording import EntryKind, read_entries, read_header
from protos.service.recording_payloads import Attachment, decode_attachment
from protos.wire.errors import DataFault, FaultError, InvalidRequest
from protos.wire.worker_info import WorkerInfo

_SIMULATED = "simulated"
_NATIVE = "native"
"""How workers on the native kernels begin to say what computes."""
_HEAD_ENTRIES = 64
"""Attach answers stand before the plans."""
_NO_WAIT_MS = 0.001


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What runs the plans again, and what is compared."""

    runner: Literal["eager", "graph"] = "eager"
    """What runs the forwards. `graph`: captured graphs of the recorded worker's buckets, chosen anew for each forward;
    needs what torch computes, so a recording of native kernels is compared with other arithmetic."""
    compare: bool = True
    """Compare tokens, statuses and log-probabilities with the recorded ones."""
    worker: str | None = None
    """Worker whose plans are run, as recorded. Default: the only one."""
    model: str | None = None
    """Model name, folder or .gguf file. Default: the recorded name."""
    model_cache: Path | None = None
    """Folder of fetched models. Default: ~/.cache/forwardplane/models."""
    numerics: Literal["fast", "reproducible"] | None = None
    """Default: the recorded worker's."""
    logprob_tolerance: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1))] = 0.0
    """Most that a log-probability may differ, for another machine or numerics."""
    simulated_eos_ratio: Annotated[float | None, Parameter(validator=validators.Number(gte=0, lte=1))] = None
    """That of a recorded simulated worker, the only one that has it. Default: 0."""


def replay(file: Path, options: ReplayOptions, console: Console) -> int:
    """Run and show. Returns the exit code: 0 equal, 1 different, failed or nothing compared, 3 refused.

    Raises:
        EngineError: the recording or the model cannot be used.
    """
    header = read_header(file)
    attachment = _attachment(file, options.worker)
    with console.status("model") as status:
        name = options.model or header.model
        folder = model_for_device(
            name, device=attachment.info.device, cache=options.model_cache, progress=status.update
        )
    flags = _flags(file, folder.path, options=options, info=attachment.info)
    return _show(_run(flags, console), console, compares=options.compare)


def _attachment(file: Path, worker: str | None) -> Attachment:
    """What the recorded worker said of itself."""
    for number, entry in enumerate(read_entries(file)):
        if entry.kind is EntryKind.ATTACH and worker in (None, entry.worker):
            return decode_attachment(entry.payload)
        if number > _HEAD_ENTRIES and worker is None:
            break
    which = "a worker" if worker is None else f"worker {worker[:100]}"
    raise InvalidRequest(f"{file.name} does not hold {which}", field="worker")


def _flags(file: Path, folder: Path, *, options: ReplayOptions, info: WorkerInfo) -> list[str]:
    (pool, *_) = info.sub_pools
    is_simulated = info.numerics == _SIMULATED
    if options.simulated_eos_ratio is not None and not is_simulated:
        message = f"--simulated-eos-ratio needs a recording of a simulated worker; this one is of {info.device}"
        raise InvalidRequest(message, field="--simulated-eos-ratio")
    values: dict[str, object] = {
        "--recording": file.absolute(),
        "--runner": options.runner,
        "--comparison": "all" if options.compare else "none",
        "--logprob-tolerance-ratio": options.logprob_tolerance,
        "--model": folder,
        "--device": info.device,
        "--page-size": pool.page_size,
        "--num-pages": pool.num_pages,
        "--max-rows": info.limits.max_rows,
        "--max-tokens": info.limits.max_tokens,
        "--window": info.limits.window,
        "--log-level": "warning",
    }
    if options.worker is not None:
        values["--recorded-worker"] = options.worker
    if is_simulated:
        values |= {"--simulated-step-ms": _NO_WAIT_MS, "--simulated-eos-ratio": options.simulated_eos_ratio or 0.0}
    else:
        values |= {"--numerics": options.numerics or info.numerics, "--dtype": info.dtype}
        if options.runner == "graph":
            values |= {f"--{entry.phase.name.lower()}-buckets": _list(entry.sizes) for entry in info.buckets}
        if options.runner == "graph" or not info.kernels.startswith(_NATIVE):
            values["--kernels"] = "torch"
    return [part for flag, value in values.items() for part in (flag, str(value))]


def _list(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _run(flags: list[str], console: Console) -> dict[str, Any]:
    """The outcome that the process says.

    Raises:
        FaultError: it ended without one.
        DataFault, InvalidRequest: it could not replay.
    """
    outcome: dict[str, Any] = {}
    command = [sys.executable, "-m", "worker_svc.replay", *flags]
    with (
        console.status("loading") as status,
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            outcome = json.loads(line)
            if "plans" in outcome:
                status.update(f"{outcome['plans']} plans")
            elif "captured" in outcome:
                status.update(f"{outcome['captured']} graphs captured")
        process.wait()
        log.seek(0)
        said = log.read()
    if "error" in outcome:
        seq = outcome["plan_seq"]
        text = outcome["error"] + (f" (plan {seq})" if seq is not None else "")
        is_refusal = process.returncode == ExitCode.BAD_INPUT
        raise (InvalidRequest if is_refusal else DataFault)(text, field="recording")
    if "counts" not in outcome:
        is_refusal = process.returncode == EX_CONFIG
        message = f"the replay ended with exit code {process.returncode}: {said.strip()[-500:]}"
        raise (InvalidRequest if is_refusal else FaultError)(message)
    return outcome


def _show(outcome: dict[str, Any], console: Console, *, compares: bool) -> int:
    counts, first = outcome["counts"], outcome["first_difference"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("worker", outcome["worker"])
    table.add_row("plans, rows, tokens", f"{counts['plans']}, {counts['rows']}, {counts['tokens']}")
    table.add_row("pages rebuilt first", str(counts["rebuilt_pages"]))
    table.add_row("not run", f"{counts['rejected']} rejected, {counts['unanswered']} without a result")
    table.add_row(
        "forward time", f"{counts['forward_ns'] / 1e9:.2f} s; recorded {counts['recorded_forward_ns'] / 1e9:.2f} s"
    )
    eager = ", ".join(f"{reason} {count}" for reason, count in sorted(counts["misses"].items()))
    table.add_row("graph replays", str(counts["replays"]))
    table.add_row("eager forwards", eager or "0")
    table.add_row("plans that differ", str(counts["differing"]) if compares else "not compared")
    if outcome["cut"] is not None:
        table.add_row("cut off", f"{outcome['cut']}: {'compared' if compares else 'run'} up to there")
    console.print(table)
    if first is None:
        if compares and not counts["plans"]:
            console.print("nothing was compared: no plan with a result stands in what could be read", highlight=False)
            return FAILURE
        return OK
    place = f"plan {first['seq']}, row {first['row']}, handle {first['handle']}, {first['field']}"
    console.print(f"first difference: {place}: recorded {first['expected']}, got {first['got']}", highlight=False)
    return FAILURE
