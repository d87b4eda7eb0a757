"""Any chain of refinements, of any parts, under any optimizer: the function, the parameters and the state."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

import tenfold
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, part_of, tables, tied_pattern

X = torch.linspace(-1, 1, 24).view(4, 6)
HAS = ("attention", "ffn", "norms")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(6), nn.Linear(6, 6, bias=False)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = x + self.attn(self.norm(x)).softmax(0)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def muon(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [Muon(matrices, lr=0.01), AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)]


OPTIMIZERS = {
    "adamw": lambda model: [AdamW(model.parameters(), lr=0.01)],
    "amsgrad": lambda model: [AdamW(model.parameters(), lr=0.01, amsgrad=True)],
    "adafactor": lambda model: [Adafactor(model.parameters(), lr=0.01)],
    "sgd": lambda model: [SGD(model.parameters(), lr=0.01, momentum=0.9)],
    "muon": muon,
}


@st.composite
def chains(draw):
    """Patterns that refine one another, the first of which shares something."""
    layers = draw(st.integers(2, 6))
    maps = [draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers).filter(lambda m: len(set(m)) < layers))]
    for _ in range(draw(st.integers(1, 3))):
        split = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
        maps.append([2 * block + bit for block, bit in zip(Pattern(maps[-1]).blocks, split, strict=True)])
    return maps


def check_optimizers(model, optimizers):
    """Each parameter once, in the order of an optimizer that is made now, with a state of its own memory."""
    fresh = {id(p): place for place, p in enumerate(model.parameters())}
    held = [[fresh[id(p)] for group in one.param_groups for p in group["params"]] for one in optimizers]
    assert all(places == sorted(places) for places in held)
    assert sorted(place for places in held for place in places) == list(range(len(fresh)))
    memory = [v.data_ptr() for one in optimizers for s in one.state.values() for v in s.values() if torch.is_tensor(v)]
    assert len(memory) == len(set(memory))


def state_of(optimizers, parameter):
    (state,) = [one.state[parameter] for one in optimizers if parameter in one.state]
    return state


@settings(max_examples=40)
@given(
    chain=chains(),
    parts=st.lists(st.sampled_from(HAS), min_size=1, unique=True).map(tuple),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    moments=st.sampled_from(["copy", "rescale", "reset"]),
    late=st.booleans(),
)
def test_a_chain_of_delinkings(chain, parts, name, moments, late):
    model = Model(len(chain[0]))
    optimizers = OPTIMIZERS[name](model) if late else []
    tenfold.share(model.layers, chain[0], parts=parts, optimizer=optimizers)
    optimizers = optimizers or OPTIMIZERS[name](model)
    check_optimizers(model, optimizers)
    for blocks in chain[1:]:
        model(X).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected = model(X)
        old = {
            (key, layer): (
                {k: v.clone() for k, v in state_of(optimizers, holder.parameter).items() if v is not None},
                tied_pattern(column),
            )
            for key, column in tables(model.layers).items()
            for layer, holder in enumerate(column)
        }
        tenfold.delink(model.layers, optimizers, blocks, parts=parts, moments=moments)
        assert torch.equal(model(X), expected)
        check_optimizers(model, optimizers)
        for key, column in tables(model.layers).items():
            shared = part_of(model.layers[0], key) in parts
            assert tied_pattern(column) == (Pattern(blocks) if shared else Pattern(range(len(column))))
            for layer, holder in enumerate(column):
                before, pattern = old[key, layer]
                now = tied_pattern(column)
                q = pattern.uses(pattern.blocks[layer]) / now.uses(now.blocks[layer])
                check_state(before, state_of(optimizers, holder.parameter), moments, q)


def check_state(old, new, moments, q):
    """The formulas of delinking.py, once more, in float64."""
    for key, value in old.items():
        found, value = new[key].double(), value.double()
        if q == 1 or moments == "copy":
            wanted = value
        elif moments == "reset":
            wanted = torch.zeros_like(value)
        elif key in ("exp_avg_sq", "max_exp_avg_sq"):
            step = old["step"].item()
            v, m = old["exp_avg_sq"].double() / (1 - 0.999**step), old["exp_avg"].double() / (1 - 0.9**step)
            wanted = value + (q - 1) * (v - m**2).clamp(min=0) * (1 - 0.999**step)
        else:
            wanted = value * (q if key in ("row_var", "col_var", "variance") else 1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)


@settings(max_examples=15)
@given(chain=chains(), parts=st.sampled_from([PARTS, ("ffn",), ("attention", "norms"), ("*.weight",)]))
def test_at_every_link_gradients_are_means_over_the_layers_that_share(chain, parts):
    model = Model(len(chain[0])).double()
    tenfold.share(model.layers, chain[0], parts=[part for part in parts if part in HAS or "*" in part])
    for blocks in chain[1:]:
        tenfold.delink(model.layers, None, blocks, parts=[part for part in parts if part in HAS or "*" in part])
        twin = Model(len(blocks)).double()
        twin.load_state_dict(model.state_dict())
        for one in (model, twin):
            one(X.double()).square().mean().backward()
        for key, column in tables(model.layers).items():
            pattern = tied_pattern(column)
            each = [holder.parameter.grad for holder in tables(twin.layers)[key]]
            for layer, holder in enumerate(column):
                same = [g for g, block in zip(each, pattern.blocks, strict=True) if block == pattern.blocks[layer]]
                torch.testing.assert_close(holder.parameter.grad, torch.stack(same).mean(0), rtol=1e-9, atol=1e-12)
        model.zero_grad()
