"""What a caller checks of its stream, in virtual time and on real processes: every token once, in order, and right."""

from collections.abc import Sequence


class Breach(AssertionError):
    """An invariant does not hold."""


def require(holds: object, rule: str, **facts: object) -> None:
    if not holds:
        raise Breach(f"{rule}: {facts}")


class StreamCheck:
    """One stream, over all the processes that serve it. `tokens` is what has come."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        """Of an undisturbed run."""
        self.tokens: list[int] = []

    def take(self, first_pos: int, token_ids: Sequence[int]) -> None:
        """More has come.

        Raises:
            Breach: a token is skipped, repeated or another one.
        """
        begin = len(self.tokens)
        require(first_pos == begin, "I1 positions", first_pos=first_pos, expected=begin)
        self.tokens.extend(token_ids)
        due = self.expected[begin : len(self.tokens)]
        require(list(token_ids) == due, "I3 tokens", position=begin, got=list(token_ids), expected=due)

    def end(self) -> None:
        """Nothing more comes.

        Raises:
            Breach: something is missing.
        """
        require(self.tokens == self.expected, "I3 all tokens", got=len(self.tokens), expected=len(self.expected))
