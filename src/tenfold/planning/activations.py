"""What the passes of a step take on a rank besides state: put together of traced layers, moment by moment.

A rank's layers are of a few kinds: as they recompute, and whether they share. What each kind adds in its forward pass,
takes at most, and gives back in its backward pass is traced once (`planning.tracing`); here a rank's own layers follow
one another, and between them the weights that FSDP2 gathers, and gradients that it sends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from tenfold.nn.recompute import Mode, Recompute
from tenfold.planning.holdings import Group, Held
from tenfold.planning.orders import Action
from tenfold.planning.tracing import Phase, Traced, trace

FP32 = 4
_NOTHING = Phase(0, 0)


@dataclass(frozen=True)
class Layered:
    """The passes of one micro-batch over a rank's layers, in the order of the depth."""

    layers: tuple[int, ...]
    modes: dict[int, Mode]
    forward: dict[int, Phase]
    backward: dict[int, Phase]
    before: Phase
    loss: Phase
    back: Phase
    after: Phase

    @property
    def kept(self) -> int:
        """Bytes between the forward pass and the backward pass."""
        return self.before.left + sum(each.left for each in self.forward.values()) + self.loss.left

    @property
    def gradients(self) -> int:
        """Bytes that the backward pass leaves, where it does not add to gradients that are there."""
        back = self.back.left + sum(each.left for each in self.backward.values()) + self.after.left
        return max(self.kept + back, 0)

    def movable(self, layer: int) -> int:
        """Bytes that a layer keeps and that could be elsewhere: those of one that does not recompute."""
        return self.forward[layer].left if self.modes[layer] == "none" else 0


def layered(
    what: Traced,
    recompute: Recompute,
    held: Sequence[Held],
    layers: Sequence[int],
    ends: tuple[bool, bool],
    sequences: int,
) -> Layered:
    """The passes over `layers` of a rank that holds `held`; `ends` tells whether the model begins and ends there.

    What `what` shares is shared by those of the layers that do.
    """
    runs: dict[int, tuple[int, ...]] = {}
    for each in held:
        if len(each.layers) > 1:
            runs.update(dict.fromkeys(each.layers, each.layers))
    modes = {layer: recompute.of(layer, what.model.layers) for layer in layers}
    forward, backward, found = {}, {}, None
    for layer in layers:
        run = runs.get(layer, ())
        mine = replace(what, mode=modes[layer]) if run else replace(what, mode=modes[layer], parts=(), rank=0)
        found = trace(mine, sequences)
        place = 0 if not run or layer == run[0] else 2 if layer == run[-1] else 1
        forward[layer], backward[layer] = found.forward[place], found.backward[place]
    assert found is not None
    first, last = ends
    before, loss, back, after = found.before, found.loss, found.back, found.after
    # A rank that has one end alone begins and ends its passes there: what is left are gradients of that end.
    outside = 0 if what.accumulates else sum(each.before_sharding for each in held if each.trained and not each.layers)
    outside *= what.gathered.itemsize
    if not last:
        loss = back = _NOTHING
        after = Phase(outside - before.left, after.most)
    if not first:
        before = after = _NOTHING
        back = Phase((outside if last else 0) - loss.left, back.most) if last else _NOTHING
    return Layered(tuple(layers), modes, forward, backward, before, loss, back, after)


class Moment(NamedTuple):
    """Bytes at one point of a pass: in all, and of these the weights that are gathered, what is on its way between
    ranks, and what layers that do not recompute have kept, which could be elsewhere."""

    most: int
    gathered: int = 0
    buffers: int = 0
    movable: int = 0


@dataclass(frozen=True)
class Gathering:
    """FSDP2 on this rank: its groups, and what each is as it is whole."""

    groups: tuple[Group, ...]
    itemsize: int
    """Of a gathered weight, and of its gradient before that is sent on."""
    keeps: bool
    """Whether weights stay whole after a forward pass."""
    shards: int
    cpu: bool

    def whole(self, group: Group) -> int:
        """Bytes of a group's weights."""
        return group.elements * self.itemsize

    def root(self) -> int:
        """Bytes of what is whole in all passes."""
        return sum(self.whole(group) for group in self.groups if not group.layers)

    def at(self, layer: int) -> list[Group]:
        """The groups that a layer needs."""
        return [group for group in self.groups if layer in group.layers]

    def flat(self, groups: Sequence[Group]) -> int:
        """Bytes of the memory in which the largest of some groups arrives, before it is copied to its parameters."""
        return max((self.whole(group) for group in groups), default=0) if self.shards > 1 else 0

    def while_forward(self, layer: int) -> tuple[int, int]:
        """Bytes of weights that are whole while a layer runs forward, and of buffers."""
        mine = self.at(layer)
        here = [each for each in self.groups if each.layers and min(each.layers) <= layer] if self.keeps else mine
        return self.root() + sum(map(self.whole, here)), self.flat(mine)

    def while_backward(self, layer: int, before: int | None, lets_go: bool) -> tuple[int, int]:
        """The same while it runs backward; the layer `before` it is on its way."""
        if self.keeps:
            here = [each for each in self.groups if each.layers and (not lets_go or min(each.layers) <= layer)]
            return self.root() + sum(map(self.whole, here)), 0
        coming = [] if before is None else [each for each in self.at(before) if layer not in each.layers]
        return self.root() + sum(map(self.whole, self.at(layer))), self.flat(coming)

    def sent(self, group: Group) -> int:
        """Bytes of the buffer in which a group's gradients are summed up."""
        return group.elements * FP32


class Passes:
    """The passes of a micro-batch on a rank, walked through."""

    def __init__(self, run: Layered, gathering: Gathering, held: Sequence[Held]) -> None:
        self._run, self._gathering = run, gathering
        self._grads: dict[Group, int] = {}
        by_name = {each.name: each for each in held}
        for group in gathering.groups:
            whole = sum(by_name[name].before_sharding for name in group.names)
            self._grads[group] = whole * gathering.itemsize
        self._own = dict.fromkeys(run.layers, 0)
        for each in held:
            if each.trained and not each.gathered and each.layers:
                self._own[each.layers[0]] += each.room * FP32

    def forward(self) -> list[Moment]:
        """The points of the forward pass, the loss included, with what is there of this micro-batch."""
        run, gathering = self._run, self._gathering
        root = gathering.root()
        alive, kept = run.before.left, 0
        found = [Moment(root + run.before.most, root)]
        for layer in run.layers:
            whole, flat = gathering.while_forward(layer)
            found.append(Moment(alive + run.forward[layer].most + whole + flat, whole, flat, kept))
            alive, kept = alive + run.forward[layer].left, kept + run.movable(layer)
        whole = gathering.while_forward(run.layers[-1])[0] if gathering.keeps else root
        found.append(Moment(alive + run.loss.most + whole, whole, 0, kept))
        return found

    def backward(self, sends: bool, accumulates: bool) -> list[Moment]:
        """The points of the backward pass, likewise.

        `sends`: whether data ranks send gradients on, group by group; they `accumulate` in what is there already, and
        not counted, or begin.
        """
        run, gathering = self._run, self._gathering
        lets_go = sends
        alive, kept, retained = run.kept, sum(map(run.movable, run.layers)), 0
        whole = gathering.while_backward(run.layers[-1], None, lets_go)[0]
        found = [Moment(alive + run.back.most + whole, whole, 0, kept)]
        alive += run.back.left
        order = list(reversed(run.layers))
        for layer, before in zip(order, [*order[1:], None], strict=True):
            whole, flat = gathering.while_backward(layer, before, lets_go)
            buffers = flat + retained
            found.append(Moment(alive + run.backward[layer].most + whole + buffers, whole, buffers, kept))
            alive += run.backward[layer].left
            kept -= run.movable(layer)
            if accumulates and gathering.groups:
                alive -= self._own[layer]
            for group in gathering.at(layer) if sends else ():
                if min(group.layers) != layer:
                    continue
                buffer = gathering.sent(group)
                found.append(Moment(alive + whole + flat + buffer, whole, flat + buffer, kept))
                alive -= self._grads[group]
                shard = buffer // group.shards
                twice = buffer * (2 if gathering.cpu and group.shards > 1 else 1)
                found.append(Moment(alive + whole + flat + twice + shard, whole, flat + twice, kept))
                alive += 0 if accumulates else shard
                retained = buffer
        whole = gathering.root()
        found.append(Moment(alive + run.after.most + whole + retained, whole, retained, kept))
        alive += run.after.left
        for group in gathering.groups if sends else ():
            if not group.layers:
                buffer = gathering.sent(group)
                found.append(Moment(alive + whole + buffer, whole, buffer))
                twice = buffer * (2 if gathering.cpu and group.shards > 1 else 1)
                alive -= self._grads[group]
                found.append(Moment(alive + twice + buffer // group.shards, 0, twice))
        return found

    def sending(self) -> int:
        """Bytes of the buffers when gradients that stayed till the end of a step are sent on."""
        sizes = [self._gathering.sent(group) for group in self._gathering.groups]
        return max(sizes, default=0) * (2 if self._gathering.cpu and self._gathering.shards > 1 else 1)


class Piped(NamedTuple):
    """The highest points of a step of pipeline passes, forward and backward, with gradients as they come to be."""

    forward: int
    backward: int
    kept: int
    """Of activations, at most."""


def piped(
    order: Sequence[Action],
    begun: Mapping[int, Layered],
    again: Mapping[int, Layered],
    hidden: int,
    slices: int = 1,
    cached: Mapping[int, int] = MappingProxyType({}),
) -> Piped:
    """Walk through what a pipeline rank does: passes of stages, each of whose micro-batches keeps what it does until
    its gradients are made. `begun` and `again` are a stage's passes where its gradients begin, and add up.

    Hidden states of a micro-batch are `hidden` bytes. PyTorch's schedules have a buffer for each that comes, and keep
    the gradient of each, until the step ends. In slices they are had as they come; a stage's gradients of keys and
    values of whole sequences are `cached` bytes.
    """
    alone = Gathering((), FP32, True, 1, True)
    over: dict[tuple[int, str], int] = {}
    """Bytes beyond what is kept before a forward pass, or of a backward pass's own, at most."""
    for stage, run in again.items():
        later, first = Passes(run, alone, ()), Passes(begun[stage], alone, ())
        over[stage, "forward"] = max(each.most for each in later.forward()) // slices
        over[stage, "backward"] = (max(each.most for each in later.backward(False, True)) - run.kept) // slices
        over[stage, "backward"] += cached.get(stage, 0)
        over[stage, "first"] = max(each.most for each in first.backward(False, False)) - begun[stage].kept
        if slices > 1:  # the first of them leaves gradients as large as all would
            over[stage, "first"] = over[stage, "backward"] + begun[stage].gradients
    kept = gradients = most_forward = most_backward = most_kept = 0
    seen: set[int] = set()
    for action in order:
        stage = action.stage
        mine = (again[stage].kept + (hidden if stage and slices > 1 else 0)) // slices
        if action.kind == "forward":
            most_forward = max(most_forward, kept + gradients + over[stage, "forward"])
            kept += mine
            most_kept = max(most_kept, kept)
            continue
        if action.kind != "weight":
            way = "backward" if stage in seen else "first"
            most_backward = max(most_backward, kept + gradients + over[stage, way])
            gradients += 0 if stage in seen else begun[stage].gradients
            gradients += hidden if stage and slices == 1 else 0
            seen.add(stage)
        if action.kind != "input":
            kept -= mine
    return Piped(most_forward, most_backward, most_kept)


def whole_gradients(gathering: Gathering, held: Sequence[Held]) -> int:
    """Bytes of all gradients before data ranks send them on."""
    by_name = {each.name: each for each in held}
    return sum(by_name[name].before_sharding for group in gathering.groups for name in group.names) * gathering.itemsize
