"""What each layer's own gradient of a shared parameter is like, without a second model and without keeping gradients.

While `LayerGradients` is open, every layer holds an alias of each shared parameter: a leaf of its own that has the same
memory. Backward then gives each alias the gradient of that layer alone; it is added to a sketch, and let go before the
next one is made.

The sketch of a vector x is m numbers: x in chunks of m, each multiplied by one fixed vector of random signs, rolled by
a random number of places and given a random sign, all added up. Sketches of sums are sums of sketches, and the product
of two is an estimate of the product of the vectors without bias, with a deviation of about |x| |y| sqrt(2 / m):
less than 0.006 of a correlation for m = 65536 (a count sketch; Charikar, Chen, Farach-Colton 2002).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Layers, Sharing, patterns, tables, tied_pattern

BUCKETS = 2**16
HALVES = 2


class _Kind(NamedTuple):
    """Parameters that share alike now and will share alike after."""

    now: Pattern
    after: Pattern


@contextmanager
def aliases(
    layers: Layers, after: Sharing, each: Callable[[str, _Kind], Pattern]
) -> Iterator[list[tuple[str, _Kind, int, nn.Parameter]]]:
    """While open, what `after` frees is held by aliases, of one memory but with gradients of their own.

    `each(name, kind)` is the pattern of the aliases. Yields them as (name, kind, first layer, alias).
    """
    held, places = [], tables(layers)
    wanted = patterns(layers, places, after)
    for name, column in places.items():
        kind = _Kind(tied_pattern(column), wanted[name])
        if kind.now != kind.after and column[0].parameter.requires_grad:
            held.append((name, kind, column, [holder.parameter for holder in column]))
    found = []
    try:
        for name, kind, column, parameters in held:
            pattern = each(name, kind)
            for block in range(pattern.stored_blocks):
                first = pattern.first_layer(block)
                alias = nn.Parameter(parameters[first].detach())
                found.append((name, kind, first, alias))
                for holder, mine in zip(column, pattern.blocks, strict=True):
                    if mine == block:
                        holder.hold(alias)
        yield found
    finally:
        for _, _, column, parameters in held:
            for holder, parameter in zip(column, parameters, strict=True):
                holder.hold(parameter)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Let every gradient go as soon as it is whole, until the hooks are removed."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    return [parameter.register_post_accumulate_grad_hook(drop) for parameter in parameters if parameter.requires_grad]


class LayerGradients:
    """Open around backward passes over one batch: sketches of the gradient of each layer, for what `after` frees.

    `others` are the parameters that train besides. Passes belong to the half of the batch that `half` says (0, 1), and
    their gradients add up to the batch's. All gradients must be clear before, and are clear after.
    """

    def __init__(self, layers: Layers, others: Iterable[nn.Parameter], after: Sharing, buckets: int = BUCKETS) -> None:
        self._layers, self._after, self._m = layers, after, buckets
        self._others = list(others)
        self.half = 0
        self._kinds: dict[_Kind, tuple[Tensor, int]] = {}  # sketches [halves, layers, m], coordinates of a layer
        self._rest: tuple[Tensor, int] | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> LayerGradients:
        shape = (HALVES, len(self._layers), self._m)
        self._open = aliases(self._layers, self._after, lambda _name, kind: Pattern(range(kind.now.layers)))
        found = self._open.__enter__()
        shared = {alias.data_ptr() for _, _, _, alias in found}
        for name, kind, layer, alias in found:
            sketches, coordinates = self._kinds.get(kind) or (_empty(shape, alias), 0)
            self._kinds[kind] = (sketches, coordinates + (alias.numel() if layer == 0 else 0))
            self._hooks.append(alias.register_post_accumulate_grad_hook(self._taker(sketches, layer, name)))
        rest = [p for p in self._others if p.requires_grad and p.data_ptr() not in shared]
        if rest:
            sketches = _empty((HALVES, 1, self._m), rest[0])
            self._rest = (sketches, sum(parameter.numel() for parameter in rest))
            for number, parameter in enumerate(rest):
                assert parameter.grad is None, "clear gradients first"
                hook = parameter.register_post_accumulate_grad_hook(self._taker(sketches, 0, f"rest/{number}"))
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._open.__exit__(None, None, None)

    def _taker(self, sketches: Tensor, row: int, name: str) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            add_sketch(sketches[self.half, row], parameter.grad, name)
            parameter.grad = None

        return take

    def correlations(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The cosine of the angle between the gradients of each two layers, over all that is freed; 0 without any."""
        dots = torch.zeros(len(self._layers), len(self._layers), dtype=torch.float64)
        for sketches, _ in self._kinds.values():
            whole = sketches.sum(0).double()
            dots += (whole @ whole.T).cpu()
        found = []
        for one, other in pairs:
            norms = math.sqrt(dots[one, one] * dots[other, other])
            found.append(max(-1.0, min(1.0, float(dots[one, other]) / norms)) if norms > 0 else 0.0)
        return found

    def gain(self, first_half: float, divided: bool) -> float:
        """How much faster the loss is predicted to fall, a step, once the layers are free.

        An optimizer that divides by the size of gradients (AdamW, Adafactor, Muon) moves a block whose layers have the
        gradients g_l (signal and noise) along G = sum of g_l by lr G / rms(G), coordinate by coordinate of like size.
        To first order the loss then falls by lr <signal of G, signal of G> / rms(G). The signal's square is the product
        of the gradients of two halves of the batch, whose noise is independent; `first_half` is the share of the batch
        that the first one is. The gain is the sum of this over the blocks of the next stage, over its sum over those of
        now; what trains besides is in both. Where updates are `divided` by the layers that share (`sharing.rates`), so
        is each block's part. The gain lies between 0 and r, the most layers that one block is freed into, or r^2.
        """
        shares = (first_half, 1 - first_half)
        now = after = 0.0
        most = 1
        for kind, (sketches, coordinates) in self._kinds.items():
            now += _progress(sketches, kind.now, coordinates, shares, divided)
            after += _progress(sketches, kind.after, coordinates, shares, divided)
            most = max(most, *(kind.now.uses(block) for block in range(kind.now.stored_blocks)))
        if self._rest is not None:
            besides = sum(_fall(self._rest[0], self._rest[1], shares))
            now, after = now + besides, after + besides
        most = most**2 if divided else most
        if after <= 0:
            return 0.0
        return float(most) if now <= 0 else min(after / now, float(most))


def add_sketch(row: Tensor, gradient: Tensor, name: str) -> None:
    """Add the sketch of a gradient to `row` [m]; `name` fixes its random signs and places."""
    m, flat = len(row), gradient.reshape(-1)
    chunks = -(-len(flat) // m)
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    places = torch.randint(0, m, (chunks,), generator=random).tolist()
    signs = (1 - 2 * torch.randint(0, 2, (chunks,), generator=random)).tolist()
    pattern = _signs(m).to(row)
    for number, (place, sign) in enumerate(zip(places, signs, strict=True)):
        chunk = flat[number * m : (number + 1) * m].to(row.dtype)
        chunk = chunk * pattern[: len(chunk)]
        before_end = min(len(chunk), m - place)
        row[place : place + before_end].add_(chunk[:before_end], alpha=sign)
        row[: len(chunk) - before_end].add_(chunk[before_end:], alpha=sign)


def _signs(m: int) -> Tensor:
    random = torch.Generator().manual_seed(m)
    return 1.0 - 2.0 * torch.randint(0, 2, (m,), generator=random)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _of_blocks(sketches: Tensor, pattern: Pattern) -> Tensor:
    """The sketches of layers added up to those of blocks, [halves, blocks, m]."""
    out = sketches.new_zeros(HALVES, pattern.stored_blocks, sketches.shape[2])
    return out.index_add_(1, torch.tensor(pattern.blocks, device=sketches.device), sketches)


def _progress(
    sketches: Tensor, pattern: Pattern, coordinates: int, shares: tuple[float, float], divided: bool
) -> float:
    """How much the loss falls in a step of the blocks of `pattern`, but for the learning rate."""
    falls = _fall(_of_blocks(sketches, pattern), coordinates, shares)
    return sum(fall / (pattern.uses(block) if divided else 1) for block, fall in enumerate(falls))


def _fall(sketches: Tensor, coordinates: int, shares: tuple[float, float]) -> list[float]:
    """For each row: the square of the signal over the root mean square of the gradient."""
    halves = sketches.double()
    signal = (halves[0] / shares[0] * (halves[1] / shares[1])).sum(-1)
    size = (halves.sum(0).square().sum(-1) / coordinates).sqrt()
    fall: list[float] = torch.where(size > 0, signal / size.clamp_min(1e-300), 0.0).tolist()
    return fall
