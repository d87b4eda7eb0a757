"""Speed of the mixture of experts: against a dense layer of the same work, a padded batched product, and Mixtral's.

A layer of E experts in Z prototypes, top-1 of each, so that a token has C = Z choices; SwiGLU, forward and backward,
in one process, the contestants in turn, `--rounds` times; the least time of each counts. The contestants:

    layer      tenfold's mixture of experts
    experts    its experts alone, on rows sorted already: the rest is routing, sorting, gathering and adding up
    dense      tenfold's dense feed-forward of width C x the experts' width: the same operations
    padded     the experts as batched products over E x capacity rows (capacity factor 1.25, dropping, as GShard)
    mixtral    Hugging Face's Mixtral block with top-C, by its grouped product and, to 32 experts, its loop (beyond, the
               loop's gradients write every expert's matrices once for each expert); the faster counts

Prints milliseconds of the dense layer and of ours, both overheads over dense (all of it, and all but the experts'
products), and our time as a share of each peer's. Mixtral is left out where `transformers` cannot be imported.

    python benchmarks/moe.py [--experts 8 64 256] [--prototypes 1 2 4 8] [--tokens 1024 4096 16384] [--dtype fp32]
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # for every contestant, as `tenfold` sets it

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.hardware.memory import keep_freed_memory
from tenfold.nn.grouped import dispatch, sort_rows
from tenfold.nn.moe import FeedForward, MixtureOfExperts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEQUENCE = 512  # tokens
LOOP_EXPERTS = 32


class Padded(nn.Module):
    """Experts as batched products over rows padded to a capacity; uses the matrices of `moe`."""

    def __init__(self, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x_BTD: Tensor) -> Tensor:
        moe, experts = self.moe, self.moe.experts
        x_ND = x_BTD.flatten(0, 1)
        logits = F.linear(x_ND.float(), moe.router.weight).unflatten(1, (moe.config.prototypes, -1))
        gates_NC, best_NC = logits.softmax(-1).max(-1)
        size = moe.config.experts // moe.config.prototypes
        choice_X = (best_NC + torch.arange(moe.config.prototypes) * size).flatten()
        capacity = math.ceil(1.25 * len(choice_X) / moe.config.experts)
        order_X = choice_X.argsort(stable=True)
        counts_E = torch.bincount(choice_X, minlength=moe.config.experts)
        place_X = torch.arange(len(order_X)) - (counts_E.cumsum(0) - counts_E)[choice_X[order_X]]
        kept_R = order_X[place_X < capacity]
        slot_R = choice_X[kept_R] * capacity + place_X[place_X < capacity]
        token_R = kept_R // gates_NC.shape[1]
        x_ECD = x_ND.new_zeros(moe.config.experts * capacity, x_ND.shape[1]).index_copy(
            0, slot_R, x_ND.index_select(0, token_R)
        )
        x_ECD = x_ECD.view(moe.config.experts, capacity, -1)
        assert experts.gate is not None
        gate, up, down = (each.to(x_ND.dtype) for each in (experts.gate, experts.up, experts.down))
        y_ECD = (F.silu(x_ECD.bmm(gate)) * x_ECD.bmm(up)).bmm(down)
        y_RD = y_ECD.flatten(0, 1).index_select(0, slot_R) * gates_NC.flatten()[kept_R, None].to(x_ND.dtype)
        return torch.zeros_like(x_ND).index_add(0, token_R, y_RD).view_as(x_BTD)


def mixtral_blocks(hidden: int, width: int, experts: int, choices: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Mixtral's block by its implementations of the experts, one set of weights; empty without transformers."""
    try:
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return {}
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_local_experts=experts,
        num_experts_per_tok=choices,
    )
    block = MixtralSparseMoeBlock(config).to(dtype)

    class By(nn.Module):
        def __init__(self, implementation: str) -> None:
            super().__init__()
            self.block, self.implementation = block, implementation

        def forward(self, x: Tensor) -> Tensor:
            config._experts_implementation = self.implementation
            out: Tensor = self.block(x)
            return out

    names = ["grouped_mm", "eager"] if experts <= LOOP_EXPERTS else ["grouped_mm"]
    return {f"mixtral {name}": By(name) for name in names}


def step(
    clock: Callable[[], float],
    module: Callable[..., Any],
    leaves: list[Tensor],
    inputs: tuple[Any, ...],
    gradient: Tensor,
) -> float:
    """Seconds of one forward and backward pass; gradients start from nothing, as in training."""
    for leaf in leaves:
        leaf.grad = None
    began = clock()
    out = module(*inputs)
    (out[0] if isinstance(out, tuple) else out).backward(gradient)
    return clock() - began


def measure(experts: int, prototypes: int, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Least seconds of every contestant."""
    dtype, clock = DTYPES[options.dtype], time.process_time if options.cpu_time else time.perf_counter
    config = ModelConfig.model_validate(
        {
            "hidden": options.hidden,
            "heads": 1,
            "ffn": options.ffn,
            "moe": {"experts": experts, "prototypes": prototypes},
        }
    )
    torch.manual_seed(0)
    moe, dense = MixtureOfExperts(config), FeedForward(config, prototypes * options.ffn)
    mixtral = mixtral_blocks(options.hidden, options.ffn, experts, prototypes, dtype)
    for module in (moe, dense, *list(mixtral.values())[:1]):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    length = min(SEQUENCE, tokens)
    x = torch.randn(tokens // length, length, options.hidden).to(dtype).requires_grad_()
    gradient = torch.randn(x.shape).to(dtype)

    with torch.no_grad():
        probabilities, _ = moe.route(x.flatten(0, 1))
        choice = moe.choose(probabilities)
        gates = probabilities.flatten(1).gather(1, choice)
        rows = sort_rows(choice, experts)
        x_RD, gates_R = dispatch(x.flatten(0, 1), gates, rows)
    x_RD, gates_R = x_RD.detach().requires_grad_(), gates_R.detach().requires_grad_()
    gradient_RD = gradient.flatten(0, 1)[rows.tokens]

    padded = Padded(moe)
    contestants: dict[str, tuple[Callable[..., Any], list[Tensor], tuple[Any, ...], Tensor]] = {
        "dense": (dense, [x, *dense.parameters()], (x,), gradient),
        "layer": (moe, [x, *moe.parameters()], (x,), gradient),
        "experts": (
            moe.experts,
            [x_RD, gates_R, *moe.parameters()],
            (x_RD, gates_R, rows.per_expert),
            gradient_RD,
        ),
        "padded": (padded, [x, *moe.parameters()], (x,), gradient),
    }
    for name, block in mixtral.items():
        contestants[name] = (block, [x, *block.parameters()], (x,), gradient)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(options.rounds + 1):
        for name, contestant in contestants.items():
            taken = step(clock, *contestant)
            for leaf in contestant[1]:
                leaf.grad = None
            if turn:  # the first is for caches
                seconds[name].append(taken)
    return {name: min(each) for name, each in seconds.items()}


def shapes(options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Experts, prototypes, tokens; a prototype of fewer than two experts would choose nothing."""
    for experts in options.experts:
        for prototypes in options.prototypes:
            if experts % prototypes == 0 and experts >= 2 * prototypes:
                for tokens in options.tokens:
                    yield experts, prototypes, tokens


def main() -> None:
    """Measure every shape, print the table and the worst figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--prototypes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=512, help="width of one expert")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of activations")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor time, on one thread: for a machine that others use"
    )
    options = parser.parse_args()
    keep_freed_memory()  # for every contestant, as `tenfold train` does
    if options.cpu_time:
        torch.set_num_threads(1)
    for name in ("experts", "prototypes", "tokens", "hidden", "ffn", "rounds"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name} must be at least 1")
    for tokens in options.tokens:
        if tokens % min(SEQUENCE, tokens):
            parser.error(f"--tokens {tokens}: take multiples of {SEQUENCE}, or fewer than that")

    console = Console(width=130, highlight=False)
    if not mixtral_blocks(16, 16, 2, 1, torch.float32):
        console.print("mixtral: skipped, transformers cannot be imported (pip install transformers)")
    columns = ("experts", "prototypes", "tokens", "dense, ms", "layer, ms", "overhead", "without products")
    console.print("  ".join((*columns, "of padded", "of mixtral")))
    found: list[tuple[int, int, int, dict[str, float]]] = []
    for experts, prototypes, tokens in shapes(options):
        found.append((experts, prototypes, tokens, measure(experts, prototypes, tokens, options)))
        dense, layer, products, padded, mixtral = _figures(found[-1][3])
        console.print(
            f"{experts:7}  {prototypes:10}  {tokens:6}  {dense * 1e3:9.1f}  {layer * 1e3:9.1f}  "
            f"{layer / dense - 1:+8.0%}  {(layer - products) / dense:+16.0%}  {layer / padded:9.2f}  "
            + (f"{layer / mixtral:10.2f}" if mixtral else "         -")
        )
    large = [(each, _figures(each[3])) for each in found if each[2] >= 4096]
    if large:
        console.print("at 4,096 tokens and more:")
        worst = max(large, key=lambda each: each[1][1] / each[1][0])
        _say(console, "worst overhead over dense", worst[0], f"{worst[1][1] / worst[1][0] - 1:+.0%}")
        worst = max(large, key=lambda each: (each[1][1] - each[1][2]) / each[1][0])
        text = f"{(worst[1][1] - worst[1][2]) / worst[1][0]:+.0%}"
        _say(console, "worst overhead without the experts' products", worst[0], text)
    for index, name in ((3, "padded"), (4, "mixtral")):
        ratios = [(_figures(each[3])[index] / _figures(each[3])[1], each) for each in found if _figures(each[3])[index]]
        if ratios:
            ratio, each = min(ratios, key=lambda pair: pair[0])
            _say(console, f"times as fast as {name}, at least", each, f"{ratio:.2f}")


def _figures(seconds: dict[str, float]) -> tuple[float, float, float, float, float]:
    """Seconds of dense, layer, experts, padded, and the faster of Mixtral's (0 without)."""
    mixtral = min((each for name, each in seconds.items() if name.startswith("mixtral")), default=0.0)
    return seconds["dense"], seconds["layer"], seconds["experts"], seconds["padded"], mixtral


def _say(console: Console, what: str, shape: tuple[Any, ...], figure: str) -> None:
    console.print(f"{what}: {figure} ({shape[0]} experts, {shape[1]} prototypes, {shape[2]} tokens)")


if __name__ == "__main__":
    main()
