"""How moments are kept between steps: fp32, bf16, or 8 bits. Optimizers always compute with them in fp32.

*bf16* is rounded stochastically: up or down at random, with the chances that make the mean right. An average that
decays slowly asks for it: with beta2 = 0.999 a second moment changes by a thousandth of itself, bf16's neighbours are
0.4 to 0.8% apart, and rounded to the nearest it would never fall (arXiv 2010.06192, section 3, on weights). The noise
is a hash of seed, name, step and position (multiply-shift: Dietzfelbinger et al. 1997): the same in every run.

*int8* is the block-wise dynamic quantisation of arXiv 2110.02861 (sections 2.1 and 2.2), rounded to the nearest: blocks
of 256 numbers, each with a scale, and codes that are dense near it and reach down to a millionth. Two details are our
own. The scale has the sign of the largest number, which is thus kept exactly though the map has no -1. And a second
moment that is not zero is not kept as zero, which would divide a first moment by epsilon (arXiv 2309.01507, 4.1).

What was decoded encodes to the same bytes, so that a run may stop and go on from decoded tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

StateFormat = Literal["fp32", "bf16", "int8"]

SMALL = 4096
"""Elements: what a parameter of fewer has stays in fp32, as in arXiv 2110.02861."""
BLOCK = 256
"""Numbers that have one scale. The paper has 2048; bitsandbytes and torchao have come to 256."""
_LEAST = 2.0**-100
"""A block whose largest number is below this is zero: products with the map would not have all their bits."""
_APART = 64
"""Bytes: scales begin at a multiple of this."""
_NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
"""State of PyTorch's optimizers that is never negative."""


@dataclass(frozen=True)
class Noise:
    """Sixteen random bits for every number of a tensor: the upper half of (`factor` * position + `offset`) mod 2^32."""

    factor: int
    offset: int

    @classmethod
    def of(cls, name: str, first: int) -> Noise:
        """Of a tensor of which the number at `first` is the first here. Every name has other bits."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        factor = int.from_bytes(digest[:4], "little") | 1
        return cls(factor, int.from_bytes(digest[4:], "little") + factor * first)

    def bits(self, begin: int, count: int, device: torch.device) -> Tensor:
        """Those of `count` numbers from `begin`, in int32."""
        found = _positions(_chunk(device), device)[:count] * _int32(self.factor)
        return found.add_(_int32(self.offset + self.factor * begin)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


class Codec(Protocol):
    """What stands between a tensor of state, flat, and the bytes that are kept of it (uint8)."""

    def size(self, count: int) -> int:
        """Bytes of so many numbers."""

    def decode(self, kept: Tensor, into: Tensor) -> None:
        """Fill `into`."""

    def encode(self, source: Tensor, kept: Tensor, noise: Noise) -> None:
        """Fill `kept`."""


@dataclass(frozen=True)
class AsItIs:
    """Numbers of `dtype`, as optimizers have them."""

    dtype: torch.dtype

    def size(self, count: int) -> int:
        """Bytes of so many numbers."""
        return count * self.dtype.itemsize

    def decode(self, kept: Tensor, into: Tensor) -> None:
        """Copy."""
        into.copy_(kept.view(self.dtype))

    def encode(self, source: Tensor, kept: Tensor, noise: Noise) -> None:
        """Copy."""
        kept.view(self.dtype).copy_(source)


class BFloat16:
    """The upper half of fp32, rounded stochastically."""

    def size(self, count: int) -> int:
        """Bytes of so many numbers."""
        return 2 * count

    def decode(self, kept: Tensor, into: Tensor) -> None:
        """Exact."""
        into.copy_(kept.view(torch.bfloat16))

    def encode(self, source: Tensor, kept: Tensor, noise: Noise) -> None:
        """Noise below the last bit that is kept, then that is cut off."""
        step = _chunk(source.device)
        for begin in range(0, len(source), step):
            part = source[begin : begin + step]
            bits = noise.bits(begin, len(part), part.device).add_(part.view(torch.int32)).bitwise_right_shift_(16)
            kept[2 * begin : 2 * (begin + len(part))].view(torch.int16).copy_(bits)
        if len(source):  # noise may carry the bits of what is no number to those of one
            kept[:2].view(torch.bfloat16).add_(source.sum() * 0.0)


@dataclass(frozen=True)
class Int8:
    """A code for each number, and behind them the scale of each block. A zero is the code 0, and the other way round
    where numbers are not `signed`."""

    signed: bool

    def size(self, count: int) -> int:
        """Bytes of so many numbers."""
        return self._scales(count) + 4 * -(-count // BLOCK)

    def decode(self, kept: Tensor, into: Tensor) -> None:
        """Of each code the number in the map, times the scale."""
        count, step = len(into), _chunk(into.device)
        values, scales = _tables(self.signed, into.device)[0], self._of_blocks(kept, count)
        for begin, end in _runs(count, step):
            part = torch.index_select(values, 0, kept[begin:end].int()).view(_blocks(end - begin))
            torch.mul(part, scales[begin // BLOCK : -(-end // BLOCK), None], out=into[begin:end].view(part.shape))

    def encode(self, source: Tensor, kept: Tensor, noise: Noise) -> None:
        """The nearest codes."""
        count, step = len(source), _chunk(source.device)
        scales = self._of_blocks(kept, count)
        for begin, end in _runs(count, step):
            part_NB = source[begin:end].view(_blocks(end - begin))
            most, least = part_NB.amax(1), part_NB.amin(1)
            scale = torch.where(most >= -least, most, least)
            scale.masked_fill_(scale.abs() < _LEAST, 0.0)
            scales[begin // BLOCK : -(-end // BLOCK)] = scale
            ratios = part_NB / torch.where(scale == 0, torch.inf, scale)[:, None]
            self._code(ratios.view(-1), kept[begin:end])

    def _code(self, ratios: Tensor, codes: Tensor) -> None:
        """Whether the next code is nearer is told by one comparison, for all ratios with the same upper half."""
        _, before, edges = _tables(self.signed, ratios.device)
        halves = ratios.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        torch.index_select(before, 0, halves, out=codes)
        codes.add_(ratios > torch.index_select(edges, 0, halves))

    def _scales(self, count: int) -> int:
        return -(-count // _APART) * _APART

    def _of_blocks(self, kept: Tensor, count: int) -> Tensor:
        return kept[self._scales(count) : self.size(count)].view(torch.float32)


def codec_of(form: StateFormat, key: str, tensor: Tensor, parameter: Tensor) -> Codec:
    """How a tensor of optimizer state is kept, `key` of `parameter`: as it is, unless it has an fp32 number for each of
    many in the parameter."""
    if form == "fp32" or tensor.dtype != torch.float32 or tensor.shape != parameter.shape or parameter.numel() < SMALL:
        return AsItIs(tensor.dtype)
    return BFloat16() if form == "bf16" else Int8(key not in _NOT_NEGATIVE)


def bytes_of(form: StateFormat) -> float:
    """Bytes that a number of a large tensor takes."""
    codecs: dict[StateFormat, Codec] = {"fp32": AsItIs(torch.float32), "bf16": BFloat16(), "int8": Int8(True)}
    return codecs[form].size(2**20) / 2**20


def dynamic_map(signed: bool) -> list[float]:
    """The 256 numbers of dynamic quantisation, ascending: 0, 1, and in each of seven decades below 1 the middles of
    equal cells, of which every decade has twice as many as the one below it."""
    found = [0.0, 1.0]
    for decade in range(7):
        cells = 2 ** (decade + (not signed))
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
        found += middles + ([-each for each in middles] if signed else [])
    return sorted(found)


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers by code [256]; and by the upper half of an fp32 ratio [65536] the code of the smallest such, and the
    edge, of which there is one at most, above which it is the next one.

    Codes count from that of zero, as bytes do: 255 is the one below it.
    """
    numbers = torch.tensor(dynamic_map(signed))
    zero = int((numbers == 0).nonzero())
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    edges = middles.float()  # the last fp32 numbers that are not above them
    edges = torch.where(edges > middles, edges.nextafter(torch.tensor(-torch.inf)), edges)
    if not signed:
        edges[zero] = 0.0
    uppers = (torch.arange(2**16, dtype=torch.int64) << 16).to(torch.int32)
    ends = torch.stack([uppers, uppers | 0xFFFF]).view(torch.float32).sort(0).values
    below, above = torch.bucketize(ends, edges)
    assert int((above - below)[ends.isfinite().all(0)].max()) == 1
    edge = torch.where(above > below, edges[below.clamp(max=254)], torch.inf)
    tables = numbers.roll(-zero), (below - zero).to(torch.uint8), edge
    return tables[0].to(device), tables[1].to(device), tables[2].to(device)


@cache
def _positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _chunk(device: torch.device) -> int:
    """Numbers that are worked on at once: so few that on a CPU they stay in its cache."""
    return 2**16 if device.type == "cpu" else 2**20


def _runs(count: int, step: int) -> list[tuple[int, int]]:
    """Of whole blocks, and at last of what is left."""
    whole = count // BLOCK * BLOCK
    found = [(begin, min(begin + step, whole)) for begin in range(0, whole, step)]
    return found + ([(whole, count)] if whole < count else [])


def _blocks(count: int) -> tuple[int, int]:
    return (count // BLOCK, BLOCK) if count >= BLOCK else (1, count)


def _int32(number: int) -> int:
    """The signed number of the last 32 bits."""
    return (number + 2**31) % 2**32 - 2**31
