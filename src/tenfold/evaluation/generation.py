"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tenfold.nn.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `count` token ids that go on from `prompt` (at least one id), each as soon as it is chosen.

    `temperature` 0 takes the likeliest token. `top_k` (0: all) and `top_p` (1: all) cut the tail before drawing.
    Ends early at `stop`, which is not given out. The model sees the last `max_positions` tokens.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(prompt, device=device)
    for _ in range(count):
        hidden, _ = model(tokens[None, -model.max_positions :])
        choice = _choose(model.logits(hidden[0, -1]).cpu(), temperature, top_k, top_p, generator)
        if choice == stop:
            return
        yield choice
        tokens = torch.cat((tokens, tokens.new_tensor([choice])))


def _choose(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    ordered, index = (logits_V / temperature).sort(descending=True, stable=True)
    probabilities = ordered.softmax(0)
    if top_k:
        probabilities[top_k:] = 0
    if top_p < 1:
        # The smallest set of likeliest tokens that reaches top_p: a token stays if those before it do not reach it.
        probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(index[torch.multinomial(probabilities, 1, generator=generator)])
