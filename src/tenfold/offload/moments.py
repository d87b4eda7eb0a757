"""Optimizer state that is not simply in the optimizer: where each piece's lies, and what stands for it meanwhile.

It is below the device, or kept in a format that optimizers do not compute in (`codec`), or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from tenfold.errors import TenfoldError
from tenfold.offload.codec import AsItIs, Codec, Noise, StateFormat, codec_of
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import Extent, Tier, Transfer, aligned
from tenfold.offload.units import APART, Entry, Piece, Portion, Unit, units_of
from tenfold.offload.workspace import Workspace
from tenfold.parallel.absent import absent, drop_memory, is_absent
from tenfold.parallel.pieces import local_of

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam)
"""Optimizers that treat every number by itself, so that a parameter may be stepped slice by slice."""
FROM_ZERO = (Adam, AdamW, SGD, RMSprop, Adamax, RAdam, Adafactor, Muon)
"""Optimizers all of whose state is zero before the first step."""


@dataclass(frozen=True, eq=False)
class Owner:
    """The optimizer that trains an entry, and the number of its group there."""

    optimizer: Optimizer
    group: int

    @property
    def wants_whole(self) -> bool:
        """Whether it needs all of a parameter at once."""
        return not isinstance(self.optimizer, BY_ELEMENT)


def is_tensor_of_state(value: Any) -> bool:
    """Whether an entry of optimizer state is kept in a tier: not so a single number, as a count of steps is."""
    return isinstance(value, Tensor) and value.dim() > 0


@dataclass(frozen=True)
class Place:
    """Where in the bytes of a piece's state a slice of one of its tensors lies: as an optimizer sees it, and as it is
    kept."""

    begin: int
    dtype: torch.dtype
    shape: torch.Size
    kept_begin: int
    codec: Codec

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in the bytes of the piece's state."""
        end = self.begin + self.shape.numel() * self.dtype.itemsize
        return memory[self.begin : end].view(self.dtype).view(self.shape)

    def kept(self, memory: Tensor) -> Tensor:
        """Its bytes, in those that are kept of the piece's state."""
        return memory[self.kept_begin : self.kept_begin + self.codec.size(self.shape.numel())]


@dataclass(frozen=True)
class StateLayout:
    """How the state of a piece lies: a place for each tensor, slice by slice.

    `size` are the bytes that are kept, `open_size` those that an optimizer sees while it steps the piece; 0: the same.
    """

    places: list[dict[str, Place]]
    size: int
    open_size: int


class Inventory:
    """What there is of a model's state: its units, cut into pieces, and for every entry its optimizer and state.

    Optimizer state exists from now on: what there was none of is zeros, without memory (`absent`).
    `entry_of` and `numbers`: see `units_of`. `form` is how state is kept between steps, `seed` what its rounding hangs
    on. `lots` says of a unit in which lot each of its experts is (`Unit.cut`).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        entry_of: Callable[[str, nn.Parameter], Entry] | None = None,
        numbers: Sequence[int] | None = None,
        form: StateFormat = "fp32",
        seed: int = 0,
        lots: Callable[[Unit], Sequence[int]] = lambda _: (),
    ) -> None:
        self.model, self.layers, self.optimizers = model, layers, optimizers
        self.numbers = range(len(layers)) if numbers is None else numbers
        self.form, self.seed = form, seed
        self.units = units_of(model, layers, entry_of, self.numbers)
        entries = {entry.parameter: entry for unit in self.units for entry in unit.entries}
        self.owners = {
            entries[parameter]: Owner(optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter in entries
        }
        for unit in self.units:
            unit.cut(self._stepped_by, lots(unit))
        for entry, owner in self.owners.items():
            if not owner.optimizer.state.get(entry.parameter):
                owner.optimizer.state[entry.parameter] = zero_state(owner, entry)

    def tensors(self, entry: Entry) -> dict[str, Tensor]:
        """The tensors of an entry's state, by key."""
        owner = self.owners.get(entry)
        state = {} if owner is None else owner.optimizer.state[entry.parameter]
        return {key: state[key] for key in sorted(state) if is_tensor_of_state(state[key])}

    def lay_out(self, piece: Piece) -> StateLayout:
        """How a piece's state lies."""
        places: list[dict[str, Place]] = []
        end = kept_end = 0
        for each in piece.slices:
            mine = {}
            for key, tensor in self.tensors(each.entry).items():
                local = local_of(tensor)
                shape = each.shape if local.shape == each.entry.shape else local.shape
                codec = codec_of(self.form, key, tensor, each.entry.parameter)
                mine[key] = Place(end, local.dtype, shape, kept_end, codec)
                end += -(-shape.numel() * local.dtype.itemsize // APART) * APART
                kept_end += -(-codec.size(shape.numel()) // APART) * APART
            places.append(mine)
        coded = any(not isinstance(place.codec, AsItIs) for mine in places for place in mine.values())
        return StateLayout(places, aligned(kept_end), aligned(end) if coded else 0)

    @property
    def bytes_at_rest(self) -> int:
        """Of weights and optimizer state, as they are between steps."""
        return sum(piece.size + self.lay_out(piece).size for unit in self.units for piece in unit.pieces)

    @property
    def open_size(self) -> int:
        """Bytes of the largest piece's state as an optimizer sees it, where it is kept in another format."""
        return max(self.lay_out(piece).open_size for unit in self.units for piece in unit.pieces)

    def _stepped_by(self, entry: Entry) -> tuple[object, bool]:
        owner = self.owners.get(entry)
        return (None, False) if owner is None else (owner.optimizer, owner.wants_whole)


class StoredMoments:
    """The tensors of optimizer state of portions, each one's in its tier of `homes`, or on the device (None).

    A parameter's portions are all here, or none. What is in the optimizer meanwhile has their shapes and is not a
    number. State that has no memory is zeros: these are not written before the first step. `step` is the number of the
    step that is asked for next.
    """

    def __init__(self, homes: dict[Portion, Tier | None], inventory: Inventory) -> None:
        self.homes, self._inventory, self.step = homes, inventory, 0
        self._extents: dict[Piece, Extent] = {}
        self._held: dict[Piece, Tensor] = {}
        self._layouts: dict[Piece, StateLayout] = {}
        self._zeros: set[Piece] = set()
        self._device = inventory.units[0].entries[0].local.device
        self._open = Slab(inventory.open_size, self._device).memory
        for portion in homes:
            self._reserve(portion)

    def _reserve(self, portion: Portion) -> None:
        tier = self.homes[portion]
        for piece in portion.pieces:
            self._layouts[piece] = self._inventory.lay_out(piece)
            size = self._layouts[piece].size
            if size and tier is None:
                self._held[piece] = torch.zeros(size, dtype=torch.uint8, device=self._device)
            elif size and tier is not None:
                self._extents[piece] = tier.reserve(size)

    def take_in(self, unit: Unit, tier: Tier, space: Workspace) -> None:
        """Have in `tier` from now on what of a unit's state is in none."""
        coming = [portion for portion in unit.portions if self.homes.get(portion) is None]
        new = [portion for portion in coming if portion not in self.homes]
        held = {piece: self._held.pop(piece) for portion in coming for piece in portion.pieces if piece in self._held}
        for portion in coming:
            self.homes[portion] = tier
            self._reserve(portion)
        self._put_away(new, space)
        for piece, kept in held.items():
            block = space.take(len(kept), "moments")
            block.bytes[: len(kept)].copy_(kept)
            space.give_after(block, self.write(piece, block.bytes[: len(kept)]))

    def put_away(self, unit: Unit, space: Workspace) -> None:
        """Move what there is of a unit's state to where it is to be."""
        self._put_away([portion for portion in unit.portions if portion in self.homes], space)

    def _put_away(self, portions: Sequence[Portion], space: Workspace) -> None:
        pieces = [piece for portion in portions for piece in portion.pieces]
        for piece in pieces:
            if self.size(piece):
                self._move(piece, space)
        for entry in {each.entry: None for piece in pieces for each in piece.slices}:
            for tensor in self._inventory.tensors(entry).values():
                drop_memory(tensor)

    def size(self, piece: Piece) -> int:
        """Bytes that are kept of a piece's state; 0: it has none, or what it has is in the optimizer."""
        return self._layouts[piece].size if piece in self._layouts else 0

    def here(self, piece: Piece) -> Tensor | None:
        """What is kept of a piece's state, if that is on the device."""
        return self._held.get(piece)

    def in_passing(self, piece: Piece) -> int:
        """Bytes of working memory that it takes on its way here and back."""
        return 0 if piece in self._held else self.size(piece)

    def read(self, piece: Piece, into: Tensor) -> Transfer | None:
        """Have what is kept of a piece brought to `into`; None where it is zeros, which are there at once."""
        if piece in self._zeros:
            into.zero_()
            return None
        return self._tier(piece).read(self._extents[piece], into)

    def write(self, piece: Piece, source: Tensor) -> Transfer:
        """Have what is to be kept of a piece written."""
        self._zeros.discard(piece)
        return self._tier(piece).write(self._extents[piece], source)

    def opened(self, piece: Piece, kept: Tensor, numbers: Iterable[int]) -> Tensor:
        """The state of slices of a piece as an optimizer sees it, in memory that is that of every piece, in turn."""
        layout = self._layouts[piece]
        if not layout.open_size:
            return kept
        for number in numbers:
            for place in layout.places[number].values():
                place.codec.decode(place.kept(kept), place.view(self._open).view(-1))
        return self._open

    def shut(self, piece: Piece, memory: Tensor, kept: Tensor, numbers: Iterable[int], step: int) -> None:
        """Keep what `opened` gave, as it is by now; `step` is what rounding hangs on."""
        layout = self._layouts[piece]
        for number in numbers if layout.open_size else ():
            each = piece.slices[number]
            for key, place in layout.places[number].items():
                name = f"{self._inventory.seed}/{step}/{each.entry.name}/{key}"
                noise = Noise.of(name, each.entry.first + each.begin)
                place.codec.encode(place.view(memory).view(-1), place.kept(kept), noise)

    def views(self, piece: Piece, number: int, memory: Tensor) -> dict[str, Tensor]:
        """The tensors of state of slice `number`, in what `opened` gave."""
        return {key: place.view(memory) for key, place in self._layouts[piece].places[number].items()}

    def close(self) -> None:
        """Give room back. The state is lost unless it was read before."""
        for piece, extent in self._extents.items():
            self._tier(piece).release(extent)

    def _tier(self, piece: Piece) -> Tier:
        tier = self.homes[piece.portion]
        assert tier is not None
        return tier

    def _move(self, piece: Piece, space: Workspace) -> None:
        if all(is_absent(tensor) for each in piece.slices for tensor in self._inventory.tensors(each.entry).values()):
            self._zeros.add(piece)
            return
        size, kept, block = self.size(piece), self.here(piece), None
        if kept is None:
            block = space.take(size, "moments")
            kept = block.bytes[:size]
        numbers = range(len(piece.slices))
        memory = self._open if self._layouts[piece].open_size else kept
        for number, each in enumerate(piece.slices):
            views = self.views(piece, number, memory)
            for key, tensor in self._inventory.tensors(each.entry).items():
                view, local = views[key], local_of(tensor)
                if is_absent(local):
                    view.zero_()
                else:
                    view.copy_(each.of(local) if local.shape == each.entry.shape else local)
        self.shut(piece, memory, kept, numbers, self.step)
        if block is not None:
            space.give_after(block, self.write(piece, kept))


def zero_state(owner: Owner, entry: Entry) -> dict[str, Any]:
    """The state that an optimizer gives an entry before its first step, its tensors without memory (see `absent`).

    Raises TenfoldError for an optimizer whose state does not begin as zeros, as far as is known.
    """
    optimizer, kind = owner.optimizer, type(owner.optimizer).__name__
    group = optimizer.param_groups[owner.group]
    if not isinstance(optimizer, FROM_ZERO) or group.get("dampening"):
        raise TenfoldError(
            f"{kind}{' with dampening' if group.get('dampening') else ''} begins with state that is not zero: let it "
            "make a step before its moments are offloaded, or keep them on the device"
        )
    # A parameter of few elements shows what there will be: each of its dimensions has a length of its own.
    lengths = [2 + 3 * dimension for dimension in range(len(entry.shape))]
    real = dict(zip(lengths, entry.shape, strict=True)) | {1: 1}
    small = nn.Parameter(torch.zeros(lengths, dtype=entry.dtype, device=entry.local.device))
    small.grad = torch.zeros_like(small)
    members, rate = [each["params"] for each in optimizer.param_groups], group["lr"]
    try:
        for each in optimizer.param_groups:
            each["params"] = []
        group["params"], group["lr"] = [small], 0.0
        plain_step(optimizer)
        found: dict[str, Any] = optimizer.state.pop(small, {})
    finally:
        for each, parameters in zip(optimizer.param_groups, members, strict=True):
            each["params"] = parameters
        group["lr"] = rate
    for key, value in found.items():
        if is_tensor_of_state(value):
            whole = torch.Size([real[length] for length in value.shape])
            found[key] = absent(whole, value.dtype, value.device)
            if whole == entry.shape and entry.local is not entry.parameter:
                found[key] = like_shards(found[key], entry.parameter)
        elif isinstance(value, Tensor):
            value.zero_()
    return found


def like_shards(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """`local` as the shard of a tensor that is split as an FSDP2 parameter is."""
    from torch.distributed.tensor import DTensor  # here: it takes seconds to import

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def plain_step(optimizer: Optimizer) -> None:
    """The step of an optimizer's class, whatever has been put over it for this one."""
    type(optimizer).step(optimizer)
