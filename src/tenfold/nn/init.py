"""Initial weights, a function of (seed, canonical parameter name, expert) alone: no layout of ranks changes them."""

from __future__ import annotations

import math

import torch

from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import LEFT, RIGHT, draw, start_right


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fill every parameter: norms 1, biases 0, matrices normal with `init_std`.

    Matrices that write into a residual stream that is not normed are scaled by 1 / sqrt(2 L) (GPT-2). A shared block
    starts as its first layer would, and a layer's low-rank difference to it at zero (`nn.low_rank`).
    """
    std = model.config.init_std
    residual_std = std if model.config.norm_position == "post" else std / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf.endswith("norm"):
            parameter.fill_(1.0)
        elif leaf.endswith(("bias", LEFT)):
            parameter.zero_()
        elif leaf.endswith(RIGHT):
            start_right(parameter, f"{seed}/{name.removesuffix(RIGHT)}")
        else:
            scale = residual_std if leaf in ("wo", "down") else std
            # A stack of experts is drawn one expert at a time, so that a rank can draw only those it holds.
            parts = parameter.unbind() if parameter.dim() == 3 else (parameter,)
            for index, part in enumerate(parts):
                part.copy_(draw(part.shape, f"{seed}/{name}/{index}").mul_(scale))
    if (pad := model.vocab_size) < len(model.embedding.weight):
        model.embedding.weight[pad:] = 0
        if model.head is not None:
            model.head.weight[pad:] = 0
