"""Hard caps of every number, list and byte count that crosses a border, in one table.

A cap is checked before the work it bounds. Callers may not raise them; a worker may advertise less.
"""

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

MAX_CALLER_MESSAGE_BYTES = 4 << 20
MAX_REFUSABLE_MESSAGE_BYTES = 8 << 20
"""Of a caller: over the limit, and still read to be refused by name. The transport refuses more, without a reason."""
MAX_MESSAGE_FIELDS = 20_000
"""Of one message, with all that is embedded. Lists of numbers are packed and count as one."""
MAX_FIELDS_OF_ONE_MESSAGE = 4096
"""Without what is embedded. Four times the longest list that is not packed."""
MAX_PLAN_BYTES = 8 << 20
MAX_RESULT_BYTES = 8 << 20
MAX_BRIDGE_MESSAGE_BYTES = 64 << 20

MAX_PLAN_ROWS = 4096
MAX_PLAN_TOKENS = 65536
MAX_PLAN_FORWARDS = 16
MAX_SUB_POOLS = 4
MAX_PLAN_MASKS = 1024
MAX_REQUIRED_FEATURES = 64
MAX_TRACEPARENT_BYTES = 64
INCARNATION_BYTES = 16
DIGEST_BYTES = 16
ISOLATION_DOMAIN_BYTES = 16
MAX_WINDOW = 8

MAX_PROMPT_BYTES = 2 << 20
MAX_PROMPT_TOKENS = 1 << 20
MAX_CHAT_MESSAGES = 256
MAX_PROMPTS_PER_CALL = 64
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CLIENT_TAG_BYTES = 128
MAX_REQUEST_ID_BYTES = 128
"""Of what a caller names to be aborted; the ids that are minted are shorter."""
MAX_CACHE_SALT_BYTES = 256
MAX_TICKET_BYTES = 256
MAX_PRIORITY = 10
MAX_LOGPROBS = 20
MAX_PROMPT_VALUES = 1 << 20
"""Log-probabilities of prompt tokens, ids and alternatives included, that one plan may ask for: half a result."""
MAX_HIDDEN_BYTES = 3 << 20
"""Of the hidden states of one plan, and of one request."""
MAX_SAMPLES = 16
MAX_HELD_BYTES = 512 << 20
MAX_HELD_BYTES_PER_CALLER = 128 << 20
"""Of the running requests of one edge process, and of one known caller there: prompts as ids, options, grammars."""
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_ADDITIVE_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_IDS = 300
MAX_LISTED_TOKEN_IDS = 4096
MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 4096

DEFAULT_DEADLINE_S = 600.0
MAX_DEADLINE_S = 86400.0
