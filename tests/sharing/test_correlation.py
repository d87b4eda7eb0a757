"""Gradients of single layers under sharing, against a plain loop over separate layers in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tenfold.nn.loss import cross_entropy_sum
from tenfold.sharing import correlation
from tenfold.sharing.correlation import LayerGradients, add_sketch
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, part_of, tie

TOKENS = torch.arange(36).view(4, 9) * 7 % 50
TOKENS[2:, 1:] = TOKENS[:2, 1:]  # two halves that have something in common
MOE = {"experts": 4, "prototypes": 2, "ffn": 8}
NONE = Sharing(Pattern.parse("none", 4))


def backward(model, rows):
    hidden, _ = model(TOKENS[rows, :-1])
    (cross_entropy_sum(hidden, model.output_weight, TOKENS[rows, 1:], model.vocab_size) / 32).backward()


def separate(tiny_decoder, model, **fields):
    """A model of the same weights with nothing shared, and for each layer its gradients by name, for two halves."""
    free = tiny_decoder("none", **fields)
    tied = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in free.named_parameters():
            parameter.copy_(tied[name])
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        free.zero_grad()
        backward(free, rows)
        grads = [{n: p.grad for n, p in layer.named_parameters() if p.grad is not None} for layer in free.layers]
        inside = {id(p) for layer in free.layers for p in layer.parameters()}
        rest = [p.grad for p in free.parameters() if p.grad is not None and id(p) not in inside]
        halves.append((grads, rest))
        free.zero_grad(set_to_none=True)
    return free, halves


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize(
    ("before", "after", "parts", "moe"),
    [
        ("all", "none", PARTS, {}),
        ("all", {"groups": 2}, PARTS, MOE),
        ({"cycle": 2}, "none", PARTS, {}),
        ("all", "none", ("ffn",), {}),
    ],
    ids=["all to none", "all to groups, experts", "cycle to none", "feed-forward alone"],
)
@pytest.mark.parametrize("divided", [False, True])
def test_correlations_and_gain_are_those_of_separate_layers(tiny_decoder, before, after, parts, moe, divided):
    now, then = (Sharing(Pattern.parse(spec, 4), parts) for spec in (before, after))
    model = tiny_decoder(before, parts=parts, moe=moe)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    held = list(model.parameters())
    with LayerGradients(model.layers, held, then, buckets=2**18) as seen:
        for half in (0, 1):
            seen.half = half
            backward(model, slice(2 * half, 2 * half + 2))
    pairs = now.pattern.neighbours()
    found, gain = seen.correlations(pairs), seen.gain(0.5, divided)

    _, halves = separate(tiny_decoder, model, moe=moe)
    shared = [n for n in halves[0][0][0] if now.of(part_of(model.layers[0], n), n).stored_blocks < 4]
    by_half = [[flat(layer[name] for name in shared) for layer in grads] for grads, _ in halves]
    whole = [one + other for one, other in zip(*by_half, strict=True)]
    for (i, j), value in zip(pairs, found, strict=True):
        assert value == pytest.approx(torch.cosine_similarity(whole[i], whole[j], dim=0).item(), abs=0.02)

    def fall(vectors):
        first, second = vectors
        rms = ((first + second) ** 2).mean().sqrt()
        return (2 * first @ (2 * second) / rms).item()

    def progress(pattern):
        blocks = [[i for i, mine in enumerate(pattern.blocks) if mine == b] for b in range(pattern.stored_blocks)]
        falls = [fall([sum(half[i] for i in block) for half in by_half]) for block in blocks]
        return sum(each / (len(block) if divided else 1) for each, block in zip(falls, blocks, strict=True))

    rest = [[*(g[n] for g in grads for n in g if n not in shared), *others] for grads, others in halves]
    besides = fall([flat(half) for half in rest])
    expected = (progress(then.pattern) + besides) / (progress(now.pattern) + besides)
    assert 0 < expected < (16 if divided else 4)
    assert gain == pytest.approx(expected, rel=0.1)

    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    assert all(parameter.grad is None for parameter in held)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class Linear(nn.Module):
    """A layer whose gradient is chosen: the loss is the product of its weight with it."""

    def __init__(self, gradient):
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(gradient))
        self.chosen = gradient


def gain_of(gradients, noise=0.0, divided=False):
    layers = nn.ModuleList(Linear(gradient) for gradient in gradients)
    tie(layers, Sharing(Pattern([0] * len(layers))))
    random = torch.Generator().manual_seed(3)
    with LayerGradients(layers, list(layers.parameters()), Sharing(Pattern(range(len(layers))))) as seen:
        for half in (0, 1):
            seen.half = half
            draws = [torch.randn(layer.chosen.shape, generator=random) for layer in layers]
            terms = zip(layers, draws, strict=True)
            sum((layer.weight * (layer.chosen + noise * draw)).sum() / 2 for layer, draw in terms).backward()
    return seen.gain(0.5, divided), seen.correlations([(0, 1)])[0]


def test_equal_layers_gain_nothing_and_unrelated_ones_the_root_of_their_number():
    random = torch.Generator().manual_seed(0)
    unrelated = torch.randn(4, 300, 200, generator=random)
    gain, together = gain_of([unrelated[0]] * 4)
    assert gain == pytest.approx(1.0, abs=0.01)
    assert together == pytest.approx(1.0, abs=0.01)
    gain, together = gain_of(list(unrelated))
    assert gain == pytest.approx(2.0, abs=0.1)  # the root of 4
    assert together == pytest.approx(0.0, abs=0.02)


def test_divided_updates_gain_their_number_besides():
    unrelated = torch.randn(4, 300, 200, generator=torch.Generator().manual_seed(0))
    assert gain_of([unrelated[0]] * 4, divided=True)[0] == pytest.approx(4.0, abs=0.04)
    assert gain_of(list(unrelated), divided=True)[0] == pytest.approx(8.0, abs=0.4)


def test_where_noise_is_all_the_size_sharing_equal_layers_is_worth_its_root():
    """The mean of 4 layers has half the noise, so that AdamW's steps along an equal signal are twice as large."""
    signal = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    gain, _ = gain_of([signal] * 4, noise=4.0)
    # rms of the sum of 4 over that of one: sqrt(16 + 4 n) against sqrt(1 + n), n = noise^2 / 2 of the whole batch.
    n = 16.0 / 2
    assert gain == pytest.approx(math.sqrt((16 + 4 * n) / (16 * (1 + n))), rel=0.1)


@pytest.mark.parametrize("kind", ["random", "of one sign", "one heavy column"])
def test_the_products_of_sketches_are_those_of_the_vectors(kind):
    random = torch.Generator().manual_seed(0)
    m, shape = 256, (50, 100)
    one, other = torch.randn(2, *shape, generator=random, dtype=torch.float64)
    if kind == "of one sign":
        one, other = one.abs(), other.abs()
    if kind == "one heavy column":
        one[:, 7] *= 30
        other[:, 7] *= 30
    errors = []
    for draw in range(300):
        rows = torch.zeros(2, m, dtype=torch.float64)
        add_sketch(rows[0], one, f"{draw}")
        add_sketch(rows[1], other, f"{draw}")
        errors.append(((rows[0] @ rows[1] - (one * other).sum()) / one.norm() / other.norm()).item())
    errors = torch.tensor(errors)
    deviation = math.sqrt(2 / m)
    assert errors.mean().abs() < 4 * deviation / math.sqrt(300)
    assert errors.std() < 1.3 * deviation


def test_sketches_add_up_as_the_vectors_do():
    one, other = torch.randn(2, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts, whole = torch.zeros(128, dtype=torch.float64), torch.zeros(128, dtype=torch.float64)
    add_sketch(parts, one, "a")
    add_sketch(parts, other, "a")
    add_sketch(whole, one + other, "a")
    torch.testing.assert_close(parts, whole)


def test_no_two_gradients_are_held_at_once(tiny_decoder, monkeypatch):
    model = tiny_decoder("all")
    live, real = [], add_sketch

    def count(row, gradient, name):
        holders = [*aliases(), *model.parameters()]
        live.append(len({id(p) for p in holders if p.grad is not None}))
        real(row, gradient, name)

    def aliases():
        return [p for layer in model.layers for p in layer.parameters()]

    monkeypatch.setattr(correlation, "add_sketch", count)
    with LayerGradients(model.layers, list(model.parameters()), NONE):
        backward(model, slice(0, 4))
    trained = sum(p.requires_grad for p in model.layers[0].parameters())
    assert len(live) > 4 * trained  # every layer's, and what is outside of layers
    assert max(live) == 1


def test_an_error_on_the_way_leaves_the_layers_as_they_were(tiny_decoder):
    model = tiny_decoder("all")
    held = list(model.parameters())
    with pytest.raises(RuntimeError, match="on the way"), LayerGradients(model.layers, held, NONE):
        raise RuntimeError("on the way")
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    backward(model, slice(0, 4))
    assert all(p.grad is not None for p in held if p.requires_grad)
