"""Small mixtures whose experts lie apart: models, inventories in which stacks are cut, and engines for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW

from tenfold.config.offload import PlacementRule
from tenfold.offload.engine import Offload
from tenfold.offload.experts import by_rules
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import explicit
from tenfold.offload.units import Entry
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

WIDTH, LAYERS, EXPERTS, VOCABULARY = 32, 3, 8, 61
PATTERNS = {"none": [0, 1, 2], "all": [0, 0, 0], "cycle": [0, 1, 0]}
EVERYTHING = {"weights": "disk", "gradients": "disk", "moments": "disk"}


class Layer(nn.Module):
    """Two stacks of experts, each of a page, and what is in no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        gates = self.router(self.norm(x)).softmax(-1)
        inner = torch.einsum("btd,edf->ebtf", x, self.up).tanh()
        return x + torch.einsum("ebtf,efd,bte->btd", inner, self.down, gates)


class Model(nn.Module):
    def __init__(self, pattern, kind=Layer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in pattern)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens[:, 1:].flatten())


def model_of(pattern, kind=Layer):
    torch.manual_seed(1)
    model = Model(pattern, kind)
    tie(model.layers, Sharing(Pattern(pattern)))
    return model


def optimizer_of(name, model):
    kinds = {"adamw": lambda each: AdamW(each, 3e-3, fused=True), "sgd": lambda each: SGD(each, 3e-2, momentum=0.9)}
    kinds["adafactor"] = lambda each: Adafactor(each, 3e-3)
    return kinds[name](model.parameters())


def entry_of(name, parameter):
    stack = parameter.dim() == 3
    return Entry(
        name, parameter, parameter, experts=[range(each, each + 1) for each in range(EXPERTS)] if stack else ()
    )


def inventory_of(pattern, lots, optimizer="adamw", form="fp32", kind=Layer):
    model = model_of(pattern, kind)
    return Inventory(
        model, list(model.layers), [optimizer_of(optimizer, model)], entry_of, form=form, seed=3, lots=lots
    )


def read(rules):
    return [PlacementRule.model_validate(rule) for rule in rules]


def lots_of(rules):
    return by_rules(read(rules), LAYERS, EXPERTS, "offload.placement.{}".format)


def parts_and_placement(inventory, rules):
    parts = parts_of(inventory, lambda _: ("embedding", "head"))
    return parts, explicit(read(rules), parts, LAYERS, EXPERTS)


def engine_of(inventory, placement, tier, **options):
    return Offload(inventory, lambda portion, kind: placement.tier(portion.name, kind), {"disk": tier}, **options)
