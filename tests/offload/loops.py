"""A model and a training loop that know nothing of offload, to compare with, and comparisons to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

WIDTH, LAYERS, VOCABULARY = 24, 5, 61
TOKENS = torch.arange(22).view(2, 11) * 7 % 50
ALL = [{"layers": "all", "weights": "disk", "gradients": "disk", "moments": "disk"}]


class Layer(nn.Module):
    """A residual layer with a product, a norm, a stack of matrices, as experts are, and parameters of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.experts = nn.Parameter(torch.randn(5, 3 * WIDTH, WIDTH) / WIDTH)
        self.gate, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two outputs, as a layer with statistics has."""
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        outs = torch.einsum("btf,efd->ebtd", inner, self.experts)
        return x + self.gate * outs.mean(0), self.scale * outs.square().mean()


class Model(nn.Module):
    """Embedding, layers, head; the embedding is the head's matrix too."""

    def __init__(self, pattern: Sequence[int] = tuple(range(LAYERS))) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = {block: Layer() for block in sorted(set(pattern))}
        self.layers = nn.ModuleList(Layer() for _ in pattern)
        for layer, block in zip(self.layers, pattern, strict=True):
            layer.load_state_dict(blocks[block].state_dict())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        x, extra = self.embedding(tokens[:, :-1]), 0.0
        for layer in self.layers:
            x, more = layer(x)
            extra = extra + more
        logits = self.norm(x) @ self.embedding.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-3 * extra


def optimizers_of(name: str, model: Model) -> list[Optimizer]:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw":
        return [AdamW(groups, lr=3e-3, fused=True)]
    if name == "sgd":
        return [SGD(groups, lr=3e-2, momentum=0.9)]
    if name == "adafactor":
        return [Adafactor(groups, lr=3e-3)]
    return [AdamW([groups[1]], lr=3e-3, fused=True), Muon(matrices, lr=3e-3, momentum=0.9)]


def train(
    model: Model,
    optimizers: Sequence[Optimizer],
    steps: int = 4,
    accumulation: int = 1,
    clip: Callable[[], object] | None = None,
) -> list[float]:
    """The losses of every pass."""
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        for _ in range(accumulation):
            loss = model(torch.randint(VOCABULARY, (2, 9), generator=generator)) / accumulation
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def two(make: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The same twice."""
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(make(*arguments))
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether trees of dicts, lists and tensors are equal to the last bit."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_same(plain: nn.Module, wanted: Sequence[Optimizer], model: nn.Module, mine: Sequence[Optimizer]) -> None:
    """Two models and their optimizers."""
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))
    for one, other in zip(wanted, mine, strict=True):
        assert equal(one.state_dict(), other.state_dict())
