"""What a relaxed stage costs: a layer's weight as the sum, matrix + left @ right, or two products with the factors.

For layers that share all their matrices, plainly, with differences made into sums (what Tenfold does), with factored
differences (x matrix^T + (x right^T) left^T, here alone), and for free layers: seconds of forward and backward, the
least of some rounds in turn, and bytes that the forward pass keeps for the backward pass besides parameters.

    python benchmarks/relaxed.py [--hidden 512] [--layers 4] [--rank 8] [--tokens 1024 4096] [--rounds 5] [--recompute]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.nn.low_rank import differences, differing
from tenfold.nn.recompute import Recompute
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

LENGTH = 256


def model_of(arguments: argparse.Namespace, sharing: Sharing) -> Decoder:
    """A Llama shape that shares so, with differences that are not zero."""
    hidden = arguments.hidden
    config = ModelConfig(
        layers=arguments.layers, hidden=hidden, heads=hidden // 64, ffn=3 * hidden, activation="swiglu", vocab_size=256
    )
    model = Decoder(config, LENGTH, recompute=Recompute("full" if arguments.recompute else "none"))
    tie(model.layers, sharing)
    initialize(model, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_left"):
                parameter.normal_(std=0.01, generator=generator)
    return model


def factor(model: Decoder) -> None:
    """Multiply by matrix, right and left one after another, in place of by their sum."""
    for module in model.layers.modules():
        if isinstance(module, nn.Linear) and differing(module) == ("weight",):
            left, right = differences(module, "weight")

            def forward(x: Tensor, module: nn.Module = module, left: Tensor = left, right: Tensor = right) -> Tensor:
                return F.linear(x, module._parameters["weight"]) + F.linear(F.linear(x, right), left)

            module.forward = forward


def kept_bytes(model: Decoder, tokens_BT: Tensor) -> int:
    """Of all storages that autograd keeps, but those of parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden, _ = model(tokens_BT)
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in seen.items() if place not in own)
    del hidden
    return found


def seconds(model: Decoder, tokens_BT: Tensor) -> float:
    """Of one forward and backward pass."""
    began = time.perf_counter()
    model(tokens_BT)[0].sum().backward()
    took = time.perf_counter() - began
    model.zero_grad()
    return took


def main() -> None:
    """Measure all in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    pattern, free = Pattern([0] * arguments.layers), Pattern(range(arguments.layers))
    kinds: dict[str, Callable[[], Decoder]] = {
        "shared": lambda: model_of(arguments, Sharing(pattern)),
        "sum": lambda: model_of(arguments, Sharing(pattern, rank=arguments.rank)),
        "factored": lambda: model_of(arguments, Sharing(pattern, rank=arguments.rank)),
        "free": lambda: model_of(arguments, Sharing(free)),
    }
    models = {name: build() for name, build in kinds.items()}
    factor(models["factored"])
    table = Table("tokens", "layers", "parameters", "seconds", "to shared", "kept for backward, MiB", box=None)
    for tokens in arguments.tokens:
        tokens_BT = torch.arange(tokens).view(-1, LENGTH) % 256
        outputs = [models[name](tokens_BT)[0].detach() for name in ("sum", "factored")]
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
        rounds = [[seconds(model, tokens_BT) for model in models.values()] for _ in range(arguments.rounds)]
        least = [min(column) for column in zip(*rounds, strict=True)]
        for (name, model), took in zip(models.items(), least, strict=True):
            stored = sum(parameter.numel() for parameter in model.layers.parameters())
            kept = kept_bytes(model, tokens_BT) / 2**20
            table.add_row(f"{tokens:,}", name, f"{stored:,}", f"{took:.3f}", f"{took / least[0]:.2f}", f"{kept:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
