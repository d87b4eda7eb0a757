import itertools

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from offload.loops import LAYERS, Model, optimizers_of, train
from offload.memory_tier import MemoryTier
from tenfold.offload.engine import Offload
from tenfold.offload.moments import Inventory
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

KINDS = ("weights", "gradients", "moments")


pytestmark = pytest.mark.usefixtures("small_pieces")


def shared(pattern):
    torch.manual_seed(1)
    model = Model()
    tie(model.layers, Sharing(Pattern(pattern)))
    return model


PATTERNS = {"none": range(LAYERS), "all": [0] * LAYERS, "groups": [0, 0, 1, 1, 1], "cycle": [0, 1, 0, 1, 0]}
BELOW = [kinds for count in (1, 2, 3) for kinds in itertools.combinations(KINDS, count)]


HOW = [(1, True), (2, False), (4, True)]
"""Passes in a step, and whether gradients are clipped."""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_training_is_the_same_to_the_last_bit(optimizer, pattern):
    for accumulation, clipped in HOW:
        plain = shared(PATTERNS[pattern])
        wanted = optimizers_of(optimizer, plain)
        losses = train(plain, wanted, 2, accumulation, clip_of(plain, clip_grad_norm_) if clipped else None)
        for below, put_off in itertools.product(BELOW, (False, True)):
            model, tier = shared(PATTERNS[pattern]), MemoryTier(delay=2)
            mine = optimizers_of(optimizer, model)
            offload = offloaded(model, mine, below, tier, put_off)
            clip = clip_of(offload, Offload.clip_grad_norm_) if clipped else None
            case = (below, put_off, accumulation, clipped)
            assert train(model, mine, 2, accumulation, clip) == losses, case
            assert_same_state(offload, mine, plain, wanted, case)
            assert tier.bytes_written > 0


def offloaded(model, optimizers, below, tier, put_off=False):
    """All that may be, of the kinds `below`, in `tier`."""

    def place(unit, kind):
        return "disk" if kind in below and (unit.layers or kind != "weights") else "device"

    return Offload(Inventory(model, model.layers, optimizers), place, {"disk": tier}, put_off=put_off)


def clip_of(what, clip):
    return lambda: clip(what.parameters() if isinstance(what, torch.nn.Module) else what, 0.1)


def assert_same_state(offload, mine, plain, wanted, case):
    """Weights and optimizer state of an offloaded model and of a plain one are equal to the last bit."""
    offload.complete()
    pairs = list(zip(plain.named_parameters(), offload.inventory.model.parameters(), strict=True))
    for (name, parameter), other in pairs:
        assert torch.equal(parameter, offload.tensor_of(name, other.data)), (name, case)
        for ours, theirs in zip(mine, wanted, strict=True):
            assert ours.state.get(other, {}).keys() == theirs.state.get(parameter, {}).keys()
            for key, value in theirs.state.get(parameter, {}).items():
                got = offload.tensor_of(f"{name}/{key}", ours.state[other][key])
                assert torch.equal(value, got), (name, key, case)
