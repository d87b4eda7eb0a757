"""What expert ranks do, each beside the whole model that it holds too. Run by `test_expert.py`."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.split_models import (
    BATCH,
    CHUNK,
    LENGTH,
    Shape,
    assert_gradients_equal,
    configured,
    example_of,
    mesh_of,
    split_model,
    summed_gradients,
    whole_model,
)
from tenfold.nn.decoder import Decoder
from tenfold.nn.moe import BALANCE, DROPPED, LOADS, Z_LOSS, MixtureOfExperts, update_balance_bias
from tenfold.nn.objective import Example, loss_sum
from tenfold.nn.recompute import Mode
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.traffic import Collectives
from tenfold.sharing.tying import users

MOE: dict[str, Any] = {"experts": 8, "ffn": 7, "balance_loss": 0.3, "z_loss": 0.2}

# Of the model. "starved": no token goes to the last experts of each prototype, half of them.
SHAPES: dict[str, dict[str, Any]] = {
    "one prototype": {"moe": MOE},
    "top 2, shared experts": {"moe": {**MOE, "top_k": 2, "shared_experts": 2}},
    "prototypes, bias": {"moe": {**MOE, "prototypes": 2, "shared_experts": 1, "bias_rate": 0.1}, "bias": True},
    "many prototypes, top 2": {"moe": {**MOE, "experts": 16, "prototypes": 4, "top_k": 2}},
    "gelu, recompute": {"moe": {**MOE, "prototypes": 2}, "activation": "gelu", "recompute": "full"},
    "selective recompute": {"moe": {**MOE, "prototypes": 2, "shared_experts": 1}, "recompute": "selective"},
    "capacity k": {"moe": {**MOE, "prototypes": 2, "capacity": "k", "capacity_factor": 1.1}},
    "capacity one, top 2, recompute": {
        "moe": {**MOE, "top_k": 2, "capacity": "one", "capacity_factor": 0.7, "shared_experts": 1},
        "recompute": "full",
    },
    "starved": {"moe": {**MOE, "prototypes": 2, "bias_rate": 0.1}, "starved": True},
    "starved, capacity": {
        "moe": {**MOE, "top_k": 2, "bias_rate": 0.1, "capacity": "k", "capacity_factor": 1.0},
        "starved": True,
    },
    "pseudo": {"moe": {**MOE, "prototypes": 2, "shared_experts": 1}, "layers": 3, "pattern": "all"},
    "experts that share": {"moe": {**MOE, "prototypes": 2, "shared_experts": 1}, "sets": "prototype"},
}


def shape_of(name: str, **changes: Any) -> Shape:
    return {**{key: value for key, value in SHAPES[name].items() if key != "starved"}, **changes}


def starve(whole: Decoder) -> None:
    for layer in whole.layers:
        assert isinstance(layer.ffn, MixtureOfExperts)
        assert layer.ffn.balance_bias is not None
        prototypes = layer.ffn.config.prototypes
        biases = layer.ffn.balance_bias.data.view(prototypes, -1)
        biases[:, biases.shape[1] // 2 :] = -10


def objective_of(model: Decoder, example: Example) -> tuple[Tensor, Tensor]:
    hidden, statistics = model(example.inputs)
    loss = loss_sum(model, hidden, example, CHUNK)
    return loss + 0.3 * statistics[:, BALANCE].sum() + 0.2 * statistics[:, Z_LOSS].sum(), statistics


def samples_of(example: Example, mesh: Mesh) -> Example:
    each = len(example.inputs) // mesh.degrees.data
    return list(example.split(each))[mesh.data_index]


def whole_batch(shape: Shape) -> Example:
    one, other = (example_of(configured(shape), seed) for seed in (1, 2))
    return Example(*(torch.cat(pair)[:BATCH] for pair in zip(one[:2], other[:2], strict=True)))


def equal_to_one_rank(degrees: Degrees, names: list[str]) -> None:
    """Loss, statistics, every gradient, balancing biases, and what is computed without gradients."""
    warnings.filterwarnings("error", ".*is deprecated", FutureWarning)
    for name in names:
        try:
            _compare(degrees, name)
        except Exception as error:
            raise AssertionError(f"{degrees}: {name}: {error}") from error


def _compare(degrees: Degrees, name: str) -> None:
    shape, mesh = shape_of(name), mesh_of(degrees)
    whole = whole_model(shape)
    if SHAPES[name].get("starved"):
        starve(whole)
    model, splits = split_model(shape, whole, degrees)
    example = whole_batch(shape)
    expected, theirs = objective_of(whole, example)
    found, statistics = objective_of(model, samples_of(example, mesh))
    expected.backward()
    found.backward()
    total, statistics = found.detach().clone(), statistics.detach().clone()
    dist.all_reduce(total)
    dist.all_reduce(statistics)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-6)  # statistics are fp32
    torch.testing.assert_close(statistics[:, LOADS:], theirs[:, LOADS:].detach(), rtol=0, atol=0)
    torch.testing.assert_close(statistics[:, DROPPED], theirs[:, DROPPED].detach(), rtol=0, atol=0)
    torch.testing.assert_close(statistics, theirs.detach(), rtol=1e-5, atol=1e-5)
    if whole.config.moe.capacity != "dropless":
        assert (statistics[:, DROPPED] > 10).all()
    assert_gradients_equal(model, splits, whole, 1e-10)
    if SHAPES[name].get("starved"):
        idle = degrees.expert > 1 and mesh.place["expert"] >= degrees.expert // 2
        own = dict(model.named_parameters())["layers.0.ffn.experts.up"].grad
        assert own is not None
        assert own.any() != idle
    if whole.config.moe.bias_rate:
        for each, loads in ((model, statistics), (whole, theirs)):
            update_balance_bias(each, users(each.layers), loads[:, LOADS:], whole.config.moe)
        biases = [[layer.ffn.balance_bias for layer in each.layers] for each in (model, whole)]
        torch.testing.assert_close(*biases, rtol=0, atol=0)
    model.eval(), whole.eval()
    with torch.no_grad():  # whole sequences on every rank, of any length
        for length in (1, LENGTH - 1):
            tokens = example.inputs[:, :length]
            torch.testing.assert_close(model(tokens)[0], whole(tokens)[0], **close)


def layers_alone(degrees: Degrees) -> None:
    """One layer: its output, and the gradient of its input, which is routed elsewhere, in float64 and bf16."""
    mesh = mesh_of(degrees)
    for name in ("many prototypes, top 2", "top 2, shared experts"):
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 0.02)):
            shape = shape_of(name, dtype=dtype)
            whole = whole_model(shape)
            model, splits = split_model(shape, whole, degrees)
            generator = torch.Generator().manual_seed(3)
            x, weights = (
                torch.randn(BATCH, LENGTH, 20, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
            )
            x.requires_grad_()
            theirs = whole.layers[0].ffn(x)[0]
            (theirs * weights).sum().backward()
            tensor, each = model.ranks.tensor, BATCH // degrees.data
            mine = slice(mesh.data_index * each, (mesh.data_index + 1) * each)
            assert x.grad is not None
            own, weights, expected, theirs = (
                tensor.own(every[mine]) for every in (x.detach(), weights, x.grad, theirs.detach())
            )
            own = own.clone().requires_grad_()
            out = model.layers[0].ffn(own)[0]
            assert out.dtype == dtype
            (out * weights).sum().backward()
            assert own.grad is not None
            _near(out, theirs, tolerance)
            _near(own.grad, expected, tolerance)
            of_whole = dict(whole.layers[0].ffn.named_parameters(prefix="layers.0.ffn"))
            layer = {name: split for name, split in splits.items() if name in of_whole}
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for key, grad in summed_gradients(model, splits).items():
                if key in layer:
                    _near(grad, splits[key].take(of_whole[key].grad), tolerance)


def _near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    wanted = wanted.double()
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm(), (found - wanted).abs().max()


class NoAttention(torch.nn.Module):
    def forward(self, x: Tensor, context: None) -> Tensor:
        return x


def counted(prototypes: int, recompute: Mode, tensor: int, expert: int) -> list[Counter[str]]:
    """Collectives of a layer's forward and backward pass, and of one without gradients."""
    degrees = Degrees(data_shard=dist.get_world_size() // tensor, tensor=tensor, expert=expert)
    shape = {"moe": {**MOE, "prototypes": prototypes}, "recompute": recompute}
    model, _ = split_model(shape, whole_model(shape), degrees)
    model.layers = model.layers[:1]
    layer = model.layers[0]
    tokens, _, _ = samples_of(whole_batch(shape), mesh_of(degrees))
    layer.attention = NoAttention()
    x = torch.randn(*model.ranks.tensor.own(tokens).shape, 20, dtype=torch.float64, requires_grad=True)
    found = []
    with Collectives() as seen:
        out = layer(x, None)[0]
    found.append(seen.counts)
    with Collectives() as seen:
        out.sum().backward()
    found.append(seen.counts)
    with Collectives() as seen, torch.no_grad():
        layer(x, None)
    return [*found, seen.counts]
