"""The enums of the plan schema as Python enums, member for member.

Knows nothing of protobuf; `tests/contract` checks that names and numbers equal the schema's.
"""

from enum import IntEnum


class ForwardMode(IntEnum):
    """What a forward computes. Compared in `worker_svc/batch/forward_mode.py` only; other code reads traits."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND = 6
    PREBUILT = 7
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9


class GraphPhase(IntEnum):
    """Which family of captured graphs. MIXED forwards count as prefill."""

    DECODE = 1
    PREFILL = 2


class GraphRefusal(IntEnum):
    """Why a forward did not replay a captured graph."""

    DISABLED = 1
    NOT_CAPTURED_YET = 2
    CAPTURE_FAILED = 3
    OVER_MAX_ROWS = 4
    OVER_MAX_TOKENS = 5
    BUCKET_TOO_LARGE = 6
    TOO_MANY_SLOTS = 7
    MODE = 8
    HIDDEN_MODE = 9
    LOGPROBS = 10
    MASK = 11
    DTYPE = 12


class HiddenMode(IntEnum):
    """Which hidden states a row returns. Ordered."""

    NULL = 1
    LAST = 2
    FULL = 3


class Feature(IntEnum):
    """Things that change a result if they are ignored."""

    TOKEN_REFERENCES = 1
    PAGE_OPERATIONS = 2
    PENALTIES = 3
    MASKS = 4
    LOGIT_BIAS = 5
    OUTPUT_LOGPROBS = 6
    PROMPT_LOGPROBS = 7
    HIDDEN_STATES = 8
    CANARY = 9
    DELTAS = 10
    WINDOW_SUB_POOL = 11
    GRAPHS = 12
    SPECULATION = 13
    ADAPTERS = 14
    RECURRENT_STATE = 15
    KV_TRANSFER = 16
    SPLIT_PREFILL = 17
    BLOCK_DIFFUSION = 18
    ATTENTION_DP = 19
    TIERED_KV = 20


class RowStatus(IntEnum):
    """What a result row is."""

    NONE = 1
    TOKEN = 2
    FAILED = 3


class RowFailure(IntEnum):
    """Why a result row failed."""

    NAN = 1
    DEPENDENCY = 2
    CANARY = 3
    LIMIT = 4
    NO_CANDIDATE = 5
    """Penalties, bias and mask leave nothing to sample: trying again gives the same."""


class SubPoolKind(IntEnum):
    """What a sub-pool of KV pages holds."""

    FULL = 1
    WINDOW = 2
    RECURRENT = 3


class WorkerState(IntEnum):
    """Life of a worker. CAPTURING is a serving state."""

    LOADING = 1
    CAPTURING = 2
    SERVING = 3
    DRAINING = 4
    FAILED = 5


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    DEADLINE = 4
    ERROR = 5
