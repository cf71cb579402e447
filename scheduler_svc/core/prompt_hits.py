"""How much of the prompts was cached when they were placed, learnt from those that were. Pure."""

_MEMORY = 0.98
"""Weight that a prompt keeps with each later one."""
_FIRST_TOKENS = 1024.0
"""Of prompts that were not cached, before anything is known."""


class PromptHits:
    """Owned by the scheduling state."""

    def __init__(self) -> None:
        self._tokens = _FIRST_TOKENS
        self._cached = 0.0

    def placed(self, prompt_tokens: int, *, cached_tokens: int) -> None:
        """A prompt was placed for the first time; so much of it had not to be computed."""
        self._tokens = self._tokens * _MEMORY + prompt_tokens
        self._cached = self._cached * _MEMORY + cached_tokens

    @property
    def cached_share(self) -> float:
        """Of the tokens of prompts; in [0, 1)."""
        return self._cached / self._tokens
