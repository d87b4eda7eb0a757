"""How alike the layers of a model are: 1 while they share, less and less after delinking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from tenfold.nn.low_rank import matrices_inside

_CHUNK = 2**20  # weights of each block that are looked at together
_MOST_LAYERS = 32


def seen_layers(layers: int) -> list[int]:
    """The layers that similarity is told of: all, or of many 32 evenly spread, the first and the last among them."""
    if layers <= _MOST_LAYERS:
        return list(range(layers))
    return [round(number * (layers - 1) / (_MOST_LAYERS - 1)) for number in range(_MOST_LAYERS)]


@torch.no_grad()
def layer_similarity(
    parts: Sequence[nn.Module],
    weights: Callable[[nn.Module], Iterable[Tensor]] = matrices_inside,
    total: Callable[[Tensor], Tensor] = lambda products: products,
) -> list[list[float]]:
    """Cosine of the angle between the weights of each two layers, [L, L], from the same part of each (its attention).

    A part's weights are one long vector: all its parameters, end to end, with a layer's own differences added. Parts of
    layers that share all of them are looked at once. Costs one pass over the weights and a product of them for each
    pair. Of many ranks each looks at what it has of the `weights` of a part, and `total` adds up their products.
    """
    keys = [tuple(part.parameters()) for part in parts]
    distinct = list(dict(zip(keys, parts, strict=True)).values())
    products_BB = torch.zeros(len(distinct), len(distinct), dtype=torch.float64)
    for same in zip(*(weights(module) for module in distinct), strict=True):
        flat = [weight.reshape(-1) for weight in same]
        for begin in range(0, flat[0].numel(), _CHUNK):
            piece_BC = torch.stack([weight[begin : begin + _CHUNK].float() for weight in flat])
            products_BB += (piece_BC @ piece_BC.T).double().cpu()
    products_BB = total(products_BB)
    norms_B = products_BB.diagonal().sqrt().clamp_min(1e-30)
    cosines_BB: Tensor = (products_BB / norms_B / norms_B[:, None]).clamp(-1, 1)
    row = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    index_L = torch.tensor([row[key] for key in keys])
    return [[round(value, 5) for value in line] for line in cosines_BB[index_L][:, index_L].tolist()]
