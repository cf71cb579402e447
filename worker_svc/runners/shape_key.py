"""The key of one captured shape: everything that a replay cannot change."""

from dataclasses import dataclass

from protos.wire.enums import GraphPhase


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShapeKey:
    """Of a graph."""

    phase: GraphPhase
    bucket: int
    """Rows of a decode graph, tokens of a prefill graph."""
    width: int = 1
    """Tokens a row of a decode graph; above 1 for the verification of drafts."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the static inputs."""
        return self.bucket * self.width
