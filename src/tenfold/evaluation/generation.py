"""Text from a model, token by token, for one prompt or for many at once.

The model sees the last `max_positions` tokens. Up to there keys and values are kept (`nn.cache`) and a token costs one
position; past it the window slides: every token it holds changes its place and loses what it once saw, so nothing kept
is right any more, and each further token costs a forward pass over the window.

Shapes: R sequences (rows), T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.evaluation.inference import inference
from tenfold.nn.cache import KeyValueCache
from tenfold.nn.decoder import Decoder


def generate(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    stop: int | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Up to `count` token ids that go on from `prompt`, each as soon as it is chosen; see `generate_batch`."""
    for _, token in generate_batch(model, [prompt], count, temperature, top_k, top_p, seed, stop, cached=cached):
        yield token


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    stop: int | None = None,
    batch_size: int = 8,
    ended: Callable[[int], bool] | None = None,
    cached: bool = True,
) -> Iterator[tuple[int, int]]:
    """(Number of the prompt, token id) as tokens are chosen, up to `count` for each prompt (at least one id, each).

    `batch_size` prompts, of any lengths, are continued side by side, and then the next ones. `temperature` 0 takes the
    likeliest token; else one is drawn from the softmax of logits / temperature, cut to the `top_k` likeliest (0: all)
    and of these to the fewest that reach `top_p` of their probability (1: all). A prompt ends early at `stop`, which is
    not given out, and when `ended(number)` is true after one of its tokens.

    What is drawn for a prompt follows from `seed` and the prompt (and how many equal ones stand before it): the others
    in the batch change nothing. `cached` False computes everything anew for each token: the slow way, to check by.
    """
    if model.config.objective == "masked":
        raise TenfoldError("the model is an encoder (model.objective = masked): it cannot write; see fill_masks")
    streams = _streams(prompts, seed)
    for first in range(0, len(prompts), batch_size):
        numbers = range(first, min(first + batch_size, len(prompts)))
        rows = [_Row(number, list(prompts[number]), streams[number]) for number in numbers]
        reader = _Reader(model, rows, count, cached)
        for _ in range(count):
            with inference(model):
                logits_RV = reader.next_logits(rows)
                draws = [0.0 if temperature == 0 else row.stream.random() for row in rows]
                choices = choose(logits_RV, draws, temperature, top_k, top_p)
            for row, choice in zip(rows, choices, strict=True):
                row.over = choice == stop
                if not row.over:
                    row.tokens.append(choice)
                    yield row.number, choice
                    row.over = ended is not None and ended(row.number)
            rows = [row for row in rows if not row.over]
            if not rows:
                break


@dataclass(eq=False)
class _Row:
    number: int
    tokens: list[int]
    stream: random.Random
    over: bool = False


def _streams(prompts: Sequence[Sequence[int]], seed: int) -> list[random.Random]:
    seen: Counter[tuple[int, ...]] = Counter()
    streams = []
    for prompt in map(tuple, prompts):
        streams.append(random.Random(repr((seed, seen[prompt], prompt))))
        seen[prompt] += 1
    return streams


class _Reader:
    """Asks the model what comes next in each row, with as little computing as is right."""

    def __init__(self, model: Decoder, rows: Sequence[_Row], count: int, cached: bool) -> None:
        self._model = model
        self._window = model.max_positions
        self._device = model.device
        self._held = self._fitting(rows) if cached else []
        self._cache: KeyValueCache | None = None
        if self._held:
            longest = max(len(row.tokens) for row in self._held)
            positions = min(self._window, longest + count - 1)
            self._cache = model.new_cache(len(self._held), positions)

    def next_logits(self, rows: Sequence[_Row]) -> Tensor:
        """Logits [R, V] of the token that follows each row."""
        kept = [row for row in self._fitting(rows) if row in self._held]
        others = [row for row in rows if row not in kept]
        hidden: dict[_Row, Tensor] = {}
        if kept:
            hidden |= zip(kept, self._go_on(kept), strict=True)
        if others:
            hidden |= zip(others, self._read(others, None), strict=True)
        return self._model.logits(torch.stack([hidden[row] for row in rows]))

    def _fitting(self, rows: Sequence[_Row]) -> list[_Row]:
        return [row for row in rows if len(row.tokens) <= self._window]

    def _go_on(self, rows: list[_Row]) -> Tensor:
        """Hidden states [R, D] at the ends of rows that the cache holds but for their last token, or not yet."""
        assert self._cache is not None
        if not any(self._cache.lengths):
            return self._read(rows, self._cache)
        if len(rows) < len(self._held):
            self._cache.keep([self._held.index(row) for row in rows])
            self._held = rows
        last = torch.tensor([row.tokens[-1:] for row in rows], device=self._device)
        return self._model(last, self._cache)[0][:, 0]

    def _read(self, rows: Sequence[_Row], cache: KeyValueCache | None) -> Tensor:
        """The same from all that the window holds of them. Padding comes after a row's end, where it is not seen."""
        seen = [row.tokens[-self._window :] for row in rows]
        lengths = [len(tokens) for tokens in seen]
        padded = [tokens + [0] * (max(lengths) - len(tokens)) for tokens in seen]
        hidden, _ = self._model(torch.tensor(padded, device=self._device), cache)
        if cache is not None:
            cache.cut(lengths)
        return hidden[range(len(rows)), [length - 1 for length in lengths]]


def choose(logits_RV: Tensor, draws: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """A token for each row: the likeliest, or by inversion of the cut distribution at `draws` (from 0 up to 1)."""
    if temperature == 0:
        likeliest: list[int] = logits_RV.argmax(-1).tolist()
        return likeliest
    logits_RV = logits_RV.double()
    share_RV = ((logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature).softmax(-1)
    index_RV = None
    if top_k or top_p < 1:
        share_RV, index_RV = share_RV.sort(descending=True, stable=True)
        if top_k:
            share_RV[:, top_k:] = 0
        if top_p < 1:
            # A token stays if those before it do not reach top_p of what is left.
            sums_RV = share_RV.cumsum(-1)
            share_RV = share_RV.where(sums_RV - share_RV < top_p * sums_RV[:, -1:], 0)
    sums_RV = share_RV.cumsum(-1)
    total_R1 = sums_RV[:, -1:]
    draw_R1 = torch.tensor(draws, dtype=torch.float64, device=logits_RV.device)[:, None] * total_R1
    # Below the total, whatever rounding does, so that what has no probability is never drawn.
    place_R1 = torch.searchsorted(sums_RV, draw_R1.minimum(total_R1.nextafter(torch.zeros_like(total_R1))), right=True)
    chosen: list[int] = (place_R1 if index_RV is None else index_RV.gather(1, place_R1))[:, 0].tolist()
    return chosen
