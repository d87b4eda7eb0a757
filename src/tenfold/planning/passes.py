"""What a part of a model does in one pass of one micro-batch, as a list: operations, exchanges, and both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tenfold.planning.terms import Collective, Operation


@dataclass(frozen=True, eq=False)
class Conveyor:
    """`count` portions that come in, are worked on and go out, the next on its way while one is worked on.

    All are asked for at the outset, and each is sent as soon as it is done. `before` is done while the first comes,
    `behind` while the last goes. `into` and `out` are of one portion, and may be none.
    """

    count: int
    into: tuple[Collective, ...] = ()
    work: tuple[Operation | Collective, ...] = ()
    out: tuple[Collective, ...] = ()
    before: tuple[Operation | Collective, ...] = ()
    behind: tuple[Operation | Collective, ...] = ()


Item = Operation | Collective | Conveyor


@dataclass(frozen=True, eq=False)
class Pass:
    """What a layer, the embedding or the head does in a forward and a backward pass, each in order.

    The backward pass is `again` (what is recomputed), then `backward`; of that what makes gradients of weights alone is
    in `weights`, which a zero-bubble schedule puts off.
    """

    name: str
    forward: tuple[Item, ...] = ()
    again: tuple[Item, ...] = ()
    backward: tuple[Item, ...] = ()
    weights: tuple[Item, ...] = ()


def each(items: Sequence[Item]) -> Iterator[tuple[Operation | Collective, int]]:
    """All operations and collectives of a list, with how often they are done."""
    for item in items:
        if isinstance(item, Conveyor):
            for inner in (*item.before, *item.behind):
                yield inner, inner.count
            for inner in (*item.into, *item.work, *item.out):
                yield inner, inner.count * item.count
        else:
            yield item, item.count


@dataclass
class Builder:
    """A pass as it is made, step by step in the order of the forward pass."""

    name: str
    selective: list[tuple[Item, ...]] = field(default_factory=list)
    """Of every step what "selective" makes again."""
    forward: list[tuple[Item, ...]] = field(default_factory=list)
    once: list[tuple[Item, ...]] = field(default_factory=list)
    """Of every step what is decided once, and never made again; before the rest of it."""
    backward: list[tuple[Item, ...]] = field(default_factory=list)
    weights: list[tuple[Item, ...]] = field(default_factory=list)
    needed: int = 0
    """So many steps recomputation goes through: up to the last of which a gradient asks."""

    def step(
        self,
        forward: Sequence[Item] = (),
        backward: Sequence[Item] = (),
        weights: Sequence[Item] = (),
        *,
        once: Sequence[Item] = (),
        kept: bool = False,
        selective: Sequence[Item] | None = None,
        needed: bool = True,
    ) -> None:
        """One step. `backward` and `weights` are in the order of the backward pass. "selective" makes `selective`
        again, unset nothing of what is `kept` and all of the rest. `needed`: whether a gradient asks for what the step
        makes."""
        self.forward.append(tuple(forward))
        self.once.append(tuple(once))
        self.backward.append(tuple(backward))
        self.weights.append(tuple(weights))
        self.selective.append(tuple(selective if selective is not None else () if kept else forward))
        if needed:
            self.needed = len(self.forward)

    def done(self, mode: str = "none") -> Pass:
        """The pass, recomputed by `mode` (`nn.recompute`)."""
        again: list[Item] = []
        if mode != "none":
            for step in (self.forward if mode == "full" else self.selective)[: self.needed]:
                again += step
        forward = [item for once, step in zip(self.once, self.forward, strict=True) for item in (*once, *step)]
        backward = [item for step in reversed(self.backward) for item in step]
        weights = [item for step in reversed(self.weights) for item in step]
        return Pass(self.name, tuple(forward), tuple(again), tuple(backward), tuple(weights))
