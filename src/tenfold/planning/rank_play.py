"""One pipeline rank's part of a step: it issues what its device does, and what it asks of links and tiers, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from tenfold.offload.forecast import Rates
from tenfold.offload.placement import Part, Placement
from tenfold.offload.rehearsal import Rehearsal
from tenfold.offload.tiers import Kind, TierName
from tenfold.offload.timeline import What
from tenfold.planning.events import Tasks
from tenfold.planning.orders import Action, order_of
from tenfold.planning.passes import Item, Pass
from tenfold.planning.pricing import Belt, Exchange, Prices
from tenfold.planning.stream import Stream
from tenfold.planning.terms import Candidate, Collective
from tenfold.planning.work import GroupWork, RankWork, StageWork

Messages = dict[tuple[str, int, int, int], int]
"""The tasks of what stages send each other: which way, the stage that sends, micro-batch and slice."""


PIECES = 256
"""Of state that is streamed through the device in a step, at most about so many are played."""


@dataclass(frozen=True)
class _Now:
    """What of a stage is gone through."""

    stage: StageWork
    micro_batch: int = 0
    slice: int = 0
    hidden: bool = True
    """Whether a backward pass makes gradients of hidden states."""
    weights: bool = True
    """And of weights."""


class RankPlay:
    """Issues the tasks of one pipeline rank. It is the clock of a rehearsal, where state lies below the device."""

    def __init__(self, tasks: Tasks, work: RankWork, prices: Prices, candidate: Candidate, messages: Messages) -> None:
        self.work, self.prices, self.candidate, self._messages = work, prices, candidate, messages
        self.stream, self._tasks = Stream(tasks, work.pipeline_rank, prices.together), tasks
        self._stages = {each.number: each for each in work.stages}
        self._layers = sorted(layer for each in work.stages for layer in each.layers)
        self._pipeline = candidate.degrees.pipeline > 1
        self._count = len(work.stages) * candidate.degrees.pipeline
        self._first: dict[int, list[GroupWork]] = {}
        self._last: dict[int, list[GroupWork]] = {}
        for group in work.groups:
            if group.layers:
                self._first.setdefault(group.layers[0], []).append(group)
                self._last.setdefault(group.layers[-1], []).append(group)
        self._root = [group for group in work.groups if not group.layers]
        there = [*self._root, *(group for layer in sorted(self._first) for group in self._first[layer])]
        back = [group for layer in sorted(self._last, reverse=True) for group in reversed(self._last[layer])]
        # What is asked for as soon as the device comes to a group: the one behind it.
        self._next = {id(one): other for one, other in pairwise(there) if other.called != "experts"}
        self._next_back = {id(one): other for one, other in pairwise(back)}
        self._coming: dict[int, list[int]] = {}
        """By group, weights on their way."""
        self._leaving: list[int] = []
        """Gradients on their way."""
        self._sent: list[int] = []
        """Messages that the device may still have to wait for."""
        self._asked: list[int] = []
        """Where the device was when the pass before was done."""
        self._fetched: list[int] = []
        """Transfers to the device since weights were last gathered."""
        self._rehearsal: Rehearsal[int] | None = None
        self._update_seconds = sum(prices.seconds(item) for item in work.update)
        self._now = _Now(work.stages[0])

    def place_state(self, parts: Sequence[Part], placement: Placement, rates: Rates, in_backward: bool) -> bool:
        """From now on the rank's state lies as `placement` says; whether anything of it is below the device."""
        if not any(placement.below(part) for part in parts):
            return False
        at = {layer: number for number, layer in enumerate(self._layers)}
        mine = [
            replace(part, layers=tuple(at[layer] for layer in part.layers if layer in at), piece=piece)
            for part, piece in zip(parts, _coarser(parts), strict=True)
        ]
        self._rates: dict[tuple[TierName, str], float] = {(tier, "read"): rate for tier, rate in rates.read.items()}
        self._rates |= {(tier, "write"): rate for tier, rate in rates.write.items()}
        self._rehearsal = Rehearsal(mine, placement, self, len(self._layers), in_backward)
        return True

    def passes(self) -> None:
        """All forward and backward passes of a step."""
        work, stream, candidate = self.work, self.stream, self.candidate
        stream.go("begin", self.prices.of(work.begin))
        if self._pipeline:
            for group in work.groups:
                self._gather(group)
        ranks = candidate.degrees.pipeline
        order = order_of(
            candidate.schedule, work.pipeline_rank, ranks, work.micro_batches, candidate.chunks, work.slices
        )
        for before, action in zip((None, *order), order, strict=False):
            self._act(action, before)
        stream.wait(*self._sent)
        self._sent = []
        if self._pipeline:
            for group in work.groups:
                self._reduce(group, last=True)
        stream.wait(*self._leaving)
        self._leaving = []

    def end(self, item: Item) -> None:
        """Something that comes behind the last pass."""
        self.stream.go("gradients", [self.prices.priced(item)])

    def tell_all(self, item: Item, place: Sequence[int]) -> None:
        """The same for what all ranks do, once they are at `place`."""
        assert isinstance(item, Collective)
        self.stream.wait(*place)
        self.stream.wait(self.stream.issue(self._exchange(item)))

    def step(self) -> None:
        """The optimizer's."""
        if self._rehearsal is None:
            self.update(1.0)
        else:
            self._rehearsal.update()

    def _act(self, action: Action, before: Action | None) -> None:
        schedule, stage = self.candidate.schedule, self._stages[action.stage]
        turns = before is not None and (before.kind == "forward") != (action.kind == "forward")
        held, self._asked = [*self._sent], self.stream.place()
        if turns and schedule == "1f1b":
            self.stream.wait(*held)  # sent in one with what this pass waits for
            held, self._sent = [], []
        self._now = _Now(stage, action.micro_batch, action.slice)
        if action.kind == "forward":
            self._receive("there", stage.number - 1, stage.number > 0)
            self._go_forward()
            self._send("there", stage.send)
        else:
            self._act_backward(action, stage)
        if schedule in ("1f1b", "terapipe"):  # what was sent before is waited for before more is
            self.stream.wait(*held)
            self._sent = [each for each in self._sent if each not in held]

    def _act_backward(self, action: Action, stage: StageWork) -> None:
        # PyTorch splits the backward pass but in the first stage, which has no gradients of hidden states to send.
        splits, first = stage.splits, stage.number == 0
        if action.kind == "weight":
            if splits:
                self._go_backward(replace(self._now, hidden=first))
            return
        self._receive("back", stage.number + 1, stage.number + 1 < self._count)
        if action.kind == "backward" or not splits:
            self._go_backward(self._now)
        elif not first:
            self._go_backward(replace(self._now, weights=False))
        self._send("back", stage.back)

    def _key(self, way: str, stage: int) -> int:
        key = way, stage, self._now.micro_batch, self._now.slice
        if key not in self._messages:
            self._messages[key] = self._tasks.new("message", way, 0.0)
        return self._messages[key]

    def _receive(self, way: str, stage: int, there: bool) -> None:
        if not there or stage in self._stages:
            return
        message = self._key(way, stage)
        if self.candidate.schedule in ("1f1b", "gpipe", "terapipe"):  # not asked for before
            self._tasks.after[message] += self._asked
        self.stream.wait(message)

    def _send(self, way: str, message: Collective | None) -> None:
        if message is None:
            return
        place, task, exchange = self.stream.place(), self._key(way, self._now.stage.number), self._exchange(message)
        self._tasks.seconds[task] = exchange.seconds
        self._tasks.what[task] = "message", f"{message.name}, micro-batch {self._now.micro_batch}"
        self._tasks.after[task] += place
        self._tasks.enter(f"{self.work.pipeline_rank} {exchange.lane}", task)
        self._sent.append(task)

    def _exchange(self, item: Collective) -> Exchange:
        priced = self.prices.priced(item)
        assert isinstance(priced, Exchange)
        return priced

    def _go_forward(self) -> None:
        """Through the stage of now."""
        if self._gathers:
            for group in self._root:
                self._gather(group, self._next)
        self._edge("embedding", forward=True)
        if self._rehearsal is None:
            for layer in self._local:
                self.forward(layer)
        else:
            self._rehearsal.forward(self._local, self._flying)
        self._edge("head", forward=True)

    def _go_backward(self, now: _Now) -> None:
        self._now = now
        last = now.micro_batch == self.work.micro_batches - 1
        self._edge("head", forward=False)
        if self._rehearsal is None or not now.weights:
            for layer in reversed(self._local):
                self.backward(layer)
        else:
            self._rehearsal.backward(self._local, self._flying, last=last)
        self._edge("embedding", forward=False)
        if self._reduces:
            for group in self._root:
                self._reduce(group, last)
            self.stream.wait(*self._leaving)
            self._leaving = []

    @property
    def _local(self) -> range:
        """The layers of the stage of now, counted among those of this rank."""
        first = self._layers.index(self._now.stage.layers.start)
        return range(first, first + len(self._now.stage.layers))

    @property
    def _flying(self) -> int:
        """A number for the micro-batch and slice of now."""
        return (self._now.micro_batch * self.work.slices + self._now.slice) * self._count + self._now.stage.number

    @property
    def _gathers(self) -> bool:
        """Whether this forward pass gathers weights: those of a pipeline's stages are whole through the step."""
        return not self._pipeline and (self.work.every_pass or self._now.micro_batch == 0)

    @property
    def _reduces(self) -> bool:
        last = self._now.micro_batch == self.work.micro_batches - 1
        return not self._pipeline and (self.work.every_pass or last)

    def _pass_of(self, layer: int) -> Pass:
        passes, first = self._now.stage.passes[self._now.slice], self._now.stage.layers.start
        return passes[layer - first + (passes[0].name == "embedding")]

    def _edge(self, name: str, forward: bool) -> None:
        """What is before or behind the layers."""
        for each in self._now.stage.passes[self._now.slice]:
            if each.name == name:
                self._through(each, name, forward)

    def _through(self, each: Pass, name: str, forward: bool) -> None:
        if forward:
            self.stream.go(f"{name} forward", self.prices.of(each.forward))
            return
        if self._now.hidden:
            self.stream.go(f"{name} backward", self.prices.of(each.again))
            self.stream.go(f"{name} backward", self.prices.of(each.backward))
        if self._now.weights:
            self.stream.go(f"{name} backward", self.prices.of(each.weights))

    def forward(self, layer: int) -> None:
        """Layer number `layer` of this rank's."""
        layer = self._layers[layer]
        each, name = self._pass_of(layer), f"layer {layer}"
        groups = self._first.get(layer, []) if self._gathers else []
        late = [group for group in groups if group.called == "experts"]
        for group in groups:
            if group not in late:
                self._gather(group, self._next)
        if not late:
            self._through(each, name, forward=True)
            return
        # These are asked for behind what ranks first tell each other of their rows.
        priced = self.prices.of(each.forward)
        at = next((at for at, one in enumerate(priced) if isinstance(one, Belt)), len(priced))
        self.stream.go(f"{name} forward", priced[:at])
        for group in late:
            self._gather(group, self._next)
        self.stream.go(f"{name} forward", priced[at:])

    def backward(self, layer: int) -> None:
        """Back through it."""
        layer = self._layers[layer]
        if not self._pipeline and self.work.regathered:
            for group in reversed(self._last.get(layer, [])):
                self._gather(group, self._next_back)
        self._through(self._pass_of(layer), f"layer {layer}", forward=False)
        if self._reduces:
            for group in self._first.get(layer, []):
                self._reduce(group, self._now.micro_batch == self.work.micro_batches - 1)

    def update(self, share: float) -> None:
        """Of the optimizer's step."""
        self.stream.compute("optimizer step", share * self._update_seconds, "optimizer")

    def move(self, what: What, tier: TierName, way: str, size: float, behind: int | None = None) -> int:
        """A transfer to or from a tier."""
        name, kind = what
        after = [*self.stream.place(), *([] if behind is None else [behind])]
        seconds = size / self._rates[tier, way]
        lane = f"{self.work.pipeline_rank} {tier} {way}"
        return self._tasks.new(
            "offload", f"{kind} of {name} {'read' if way == 'read' else 'written'}", seconds, after, lane
        )

    def wait(self, transfer: int) -> None:
        """For a transfer."""
        self.stream.wait(transfer)
        self._fetched.append(transfer)

    def _gather(self, group: GroupWork, following: Mapping[int, GroupWork] = MappingProxyType({})) -> None:
        """The device comes to weights, waits for them, and the next are on their way meanwhile."""
        stream = self.stream
        stream.wait(*(self._coming.pop(id(group), None) or self._ask(group)))
        copies = [one for one in self.prices.of(group.gather) if not isinstance(one, Exchange)]
        stream.go(f"{group.name} gathered", copies)
        if id(group) in following:
            after = following[id(group)]
            self._coming[id(after)] = self._ask(after)

    def _ask(self, group: GroupWork) -> list[int]:
        """For weights of other ranks: behind what came to the device of one's own."""
        stream, fetched = self.stream, self._fetched
        self._fetched = []
        found = []
        for one in self.prices.of(group.gather):
            if isinstance(one, Exchange):
                after = [*stream.place(), *fetched]
                found.append(stream.issue(Exchange(f"{group.name} gathered", one.lane, one.seconds), after))
        return found

    def _reduce(self, group: GroupWork, last: bool) -> None:
        """Gradients leave; copies of them are added up behind the last."""
        stream, behind = self.stream, None
        for one in self.prices.of(group.scatter):
            if isinstance(one, Exchange):
                behind = stream.issue(Exchange(f"{group.name} reduced", one.lane, one.seconds))
                self._leaving.append(behind)
            else:
                stream.go(f"{group.name} reduced", [one])
        if last and group.replicate is not None:
            one = self._exchange(group.replicate)
            after = None if behind is None else [behind]
            self._leaving.append(stream.issue(Exchange(f"{group.name} added up", one.lane, one.seconds), after))


def _coarser(parts: Sequence[Part]) -> list[dict[Kind, int]]:
    """The pieces of parts, so large that there are about `PIECES` of them: a stream of thousands takes as long."""
    whole: dict[Kind, int] = {}
    for part in parts:
        for kind, size in part.bytes.items():
            whole[kind] = whole.get(kind, 0) + size
    return [
        {kind: max(size, min(part.bytes.get(kind, 0), -(-whole[kind] // PIECES))) for kind, size in part.piece.items()}
        for part in parts
    ]


def finish(ranks: Sequence[RankPlay]) -> None:
    """What comes behind the last pass; where all ranks tell each other something they wait for the slowest."""
    ends = [list(rank.work.end) for rank in ranks]
    while any(ends):
        for rank, end in zip(ranks, ends, strict=True):
            while end and not (isinstance(end[0], Collective) and end[0].axis == "world"):
                rank.end(end.pop(0))
        if any(ends):
            place = [task for rank in ranks for task in rank.stream.place()]
            for rank, end in zip(ranks, ends, strict=True):
                rank.tell_all(end.pop(0), place)
    for rank in ranks:
        rank.step()
