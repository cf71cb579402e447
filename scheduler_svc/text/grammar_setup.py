"""What grammar processes are told of the served model and their limits."""

from protos.service.model_files import ModelFolder
from scheduler_svc.config import GrammarConfig
from scheduler_svc.text.grammar_messages import Greeting


def grammar_greeting(folder: ModelFolder, config: GrammarConfig) -> Greeting:
    """The same for edges, which try grammars out, and for the core, whose rows are masked."""
    return Greeting(
        tokenizer=str(folder.tokenizer),
        vocab_size=folder.card.vocab_size,
        eos_token_ids=folder.card.eos_token_ids,
        memory_bytes=config.grammar_memory_bytes,
        cpu_s=config.grammar_cpu_s,
        cache_bytes=config.grammar_cache_bytes,
    )
