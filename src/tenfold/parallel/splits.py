"""What a rank holds of each parameter: which of its indices, by tensor and expert ranks, and who else holds the same.

Data ranks split what a rank holds by this once more (FSDP2), without a word here. Whatever the layout, a parameter has
its canonical name and its whole shape in checkpoints, and initial weights are those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.regions import Ranges, Region

MEANS = {"row_var": -1, "col_var": -2}
"""Kinds of optimizer state that have one number for all of a dimension of a parameter: Adafactor's means over it."""


@dataclass(frozen=True)
class Split:
    """This rank's part of a parameter: of every dimension the indices in `held`, in order."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    held: Region
    by_expert: bool = False
    """Whether expert ranks hold different parts of it."""
    tensor_copies: tuple[int, ...] = (0,)
    """The tensor ranks that hold this same part."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return tuple(sum(map(len, ranges)) for ranges in self.held)

    @property
    def whole(self) -> bool:
        """Whether this rank has all of it."""
        return self.local_shape == self.shape

    def take(self, whole: Tensor, from_dim: int = 0) -> Tensor:
        """This rank's part of `whole`, or of a part of it: its last dimensions, from `from_dim` on."""
        for dim, ranges in enumerate(self.held[from_dim:]):
            if sum(map(len, ranges)) < whole.shape[dim]:
                whole = torch.cat([whole.narrow(dim, each.start, len(each)) for each in ranges], dim)
        return whole


def share_of(total: int, parts: int, part: int) -> range:
    """Of `total` things in a row those of `part`, as even as can be."""
    return range(total * part // parts, total * (part + 1) // parts)


def heads_of(config: ModelConfig, tensor: int, rank: int) -> tuple[range, range]:
    """The query heads and the key heads of a tensor rank. Of fewer key heads than ranks some have the same one."""
    group = config.heads // config.key_heads
    if tensor > config.key_heads:
        key = rank * config.key_heads // tensor
        return share_of(config.heads, tensor, rank), range(key, key + 1)
    keys = share_of(config.key_heads, tensor, rank)
    return range(keys.start * group, keys.stop * group), keys


def vocabulary_of(config: ModelConfig, tensor: int, rank: int) -> range:
    """The rows of the embedding, and of the output matrix, of a tensor rank."""
    return share_of(config.padded_vocab(), tensor, rank)


def experts_of(config: ModelConfig, expert: int, rank: int) -> Ranges:
    """The experts of an expert rank: of every prototype an equal part, so that each keeps every rank busy."""
    moe = config.moe
    size = moe.experts // moe.prototypes
    mine = share_of(size, expert, rank)
    return tuple(range(z * size + mine.start, z * size + mine.stop) for z in range(moe.prototypes))


def splits_of(model: nn.Module, config: ModelConfig, degrees: Degrees, tensor: int, expert: int) -> dict[str, Split]:
    """For every parameter of a whole `model` (of any device) what the rank at `tensor` and `expert` holds, by name."""
    return {
        name: split_of(name, tuple(parameter.shape), config, degrees, tensor, expert)
        for name, parameter in model.named_parameters()
    }


def split_of(
    name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, tensor: int, expert: int
) -> Split:
    """The same for one parameter of that name and whole shape, or a tensor of its optimizer state ("name/kind")."""
    return splits_along(name, shape, config, degrees, expert)[tensor]


def splits_along(name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, expert: int) -> list[Split]:
    """The same of every tensor rank at an expert rank."""
    found = [_held(name, shape, config, degrees, tensor, expert) for tensor in range(degrees.tensor)]
    ranks: dict[tuple[Ranges, ...], list[int]] = {}
    for tensor, (held, _) in enumerate(found):
        ranks.setdefault(held, []).append(tensor)
    return [Split(shape, held, by_expert, tuple(ranks[held])) for held, by_expert in found]


def _held(
    name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, tensor: int, expert: int
) -> tuple[tuple[Ranges, ...], bool]:
    """The indices that a rank holds of every dimension, and whether expert ranks hold different ones."""
    if not shape:
        return (), False
    name, _, of_state = name.partition("/")
    held: list[Ranges] = [(range(size),) for size in shape]
    kind, module, leaf = _kind(name.removesuffix(LEFT).removesuffix(RIGHT))
    row, column = divmod(tensor, degrees.columns)
    of_heads, of_keys = heads_of(config, degrees.columns, column)
    by_expert = False

    def scaled(heads: range) -> Ranges:
        return (range(heads.start * config.head_width, heads.stop * config.head_width),)

    def share(dim: int) -> Ranges:
        return (share_of(shape[dim], degrees.columns, column),)

    parts: dict[int, Ranges] = {}  # by dimension
    block = None  # the dimension that the rows of a grid split
    if kind == "vocabulary":
        parts, block = {0: share(0)}, 1
    elif module in ("wq", "wk", "wv"):
        parts, block = {0: scaled(of_heads if module == "wq" else of_keys)}, 1
    elif module == "wo" and leaf == "weight":
        parts, block = {1: scaled(of_heads)}, 0
    elif kind == "ffn" and module in ("gate", "up"):
        parts, block = {0: share(0)}, 1
    elif kind == "ffn" and leaf == "weight":
        parts, block = {1: share(1)}, 0
    elif kind == "experts":
        dim = 2 if leaf in ("gate", "up") else 1
        parts = {dim: share(dim)}
        if degrees.expert > 1 and shape[0] == config.moe.experts:
            held[0], by_expert = experts_of(config, degrees.expert, expert), True
    if block is not None and block < len(shape):
        parts[block] = (share_of(shape[block], degrees.rows, row),)
    for dim, ranges in parts.items():
        last = dim == len(shape) - 1  # of a difference's two halves left has the first dimensions, right the last
        if not (name.endswith(LEFT) and last) and not (name.endswith(RIGHT) and not last):
            held[dim] = ranges
    if of_state in MEANS:
        held[MEANS[of_state]] = (range(1),)
    return tuple(held), by_expert


def state_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The whole shape of a tensor of optimizer state, "name/kind", of a parameter of that shape; without a kind it is
    the parameter."""
    dim = MEANS.get(key.partition("/")[2])
    if dim is None:
        return shape
    return tuple(1 if at == len(shape) + dim else size for at, size in enumerate(shape))


def in_a_layer(name: str) -> str:
    """A parameter's name without its layer's number: those that are called alike lie alike."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _kind(name: str) -> tuple[str, str, str]:
    """What a parameter is, the name of its module, and its own: ("attention", "wq", "weight")."""
    *path, leaf = name.split(".")
    module = path[-1] if path else ""
    if name in ("embedding.weight", "head.weight", "output_bias"):
        return "vocabulary", module, leaf
    if "experts" in path:
        return "experts", module, leaf
    if "ffn" in path and module in ("gate", "up", "down"):
        return "ffn", module, leaf
    return "attention" if "attention" in path else "", module, leaf


def cut(model: nn.Module, splits: dict[str, Split]) -> None:
    """Leave of each parameter of `model`, on the meta device, what the rank holds. Ties stay ties."""
    found: dict[nn.Parameter | None, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not splits[name].whole:
            found[parameter] = nn.Parameter(
                parameter.new_empty(splits[name].local_shape), requires_grad=parameter.requires_grad
            )
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old in found:
                module._parameters[leaf] = found[old]
