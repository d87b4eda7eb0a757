"""What is foreseen of a stage, few numbers that a run can be held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tenfold.planning.memory import RankMemory


@dataclass(frozen=True)
class Foreseen:
    """Of a stage: seconds of a step, and bytes of tensors on the device of the rank that holds most."""

    seconds: float
    device_bytes: int
    by: Literal["plan", "run file", "offload"]
    """The planner as the run began; a plan that the run file has in it; the forecast of a placement."""
    cluster: str = ""
    """For which ranks."""

    def dump(self) -> dict[str, Any]:
        """As JSON has it."""
        return vars(self)


def tensors_of(memory: Sequence[RankMemory]) -> int:
    """Bytes of tensors of the fullest pipeline rank: what an allocator leaves unused is of none."""
    return max(each.needed - each.items.get("reserve", 0) for each in memory)
