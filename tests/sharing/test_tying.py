"""Sharing as ties: which parameters are one, for every part, and that ties outlive the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tenfold.config.model import ModelConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, holders, materialize, part_of, tables, tie, tied_pattern, uses

MOE = {"experts": 4, "prototypes": 2, "ffn": 8, "bias_rate": 0.01, "shared_experts": 1}
# What belongs to which part, written out by hand.
OF_PART = {
    "norms": {"attention_norm.weight", "ffn_norm.weight", "attention.q_norm.weight", "attention.k_norm.weight"},
    "attention": {f"attention.{leaf}.weight" for leaf in ("wq", "wk", "wv", "wo")},
    "router": {"ffn.router.weight", "ffn.balance_bias"},
    "experts": {"ffn.experts.gate", "ffn.experts.up", "ffn.experts.down"},
    "ffn": {"ffn.shared.gate.weight", "ffn.shared.up.weight", "ffn.shared.down.weight"},
}


@pytest.fixture
def mixture(tiny_decoder):
    return lambda sharing="none", **fields: tiny_decoder(sharing, qk_norm=True, moe=MOE, **fields)


def test_every_parameter_of_a_mixture_belongs_to_the_part_that_its_name_says(mixture):
    layer = mixture().layers[0]
    found = {part: {name for name in holders(layer) if part_of(layer, name) == part} for part in PARTS}
    assert found == OF_PART


def test_a_dense_feed_forward_is_ffn(tiny_decoder):
    layer = tiny_decoder().layers[0]
    assert {name for name in holders(layer) if part_of(layer, name) == "ffn"} == {
        f"ffn.{leaf}.weight" for leaf in ("gate", "up", "down")
    }


@pytest.mark.parametrize("parts", [("attention",), ("experts",), ("router", "norms"), ("attention", "experts", "ffn")])
@pytest.mark.parametrize("sharing", ["all", "sandwich", [0, 1, 0, 1]])
def test_only_the_parts_that_are_named_are_shared_and_exactly_they(mixture, sharing, parts):
    model = mixture(sharing, parts=parts)
    pattern, free = Pattern.parse(sharing, 4), Pattern(range(4))
    shared_names = set().union(*(OF_PART[part] for part in parts))
    for name, column in tables(model.layers).items():
        assert tied_pattern(column) == (pattern if name in shared_names else free), name
    counts = uses(model.layers)
    for name, column in tables(model.layers).items():
        for layer, holder in enumerate(column):
            wanted = pattern.uses(pattern.blocks[layer]) if name in shared_names else 1
            assert counts[holder.parameter] == wanted


def test_a_glob_names_parameters(mixture):
    model = mixture()
    tie(model.layers, Sharing(Pattern.parse("all", 4), ("*.wq.*", "norms")))
    shared = {name for name, column in tables(model.layers).items() if tied_pattern(column).stored_blocks == 1}
    assert shared == OF_PART["norms"] | {"attention.wq.weight"}


def test_what_nothing_belongs_to_is_refused_by_name(tiny_decoder):
    with pytest.raises(TenfoldError, match="nothing of 'experts' to share; they have attention, ffn, norms"):
        tie(tiny_decoder().layers, Sharing(Pattern.parse("all", 4), ("attention", "experts")))


def test_layers_of_another_number_or_kind_are_refused(tiny_decoder):
    with pytest.raises(TenfoldError, match="for 3 layers, not 4"):
        tie(tiny_decoder().layers, Sharing(Pattern.parse("all", 3)))
    with pytest.raises(TenfoldError, match=r"only layer 0 has bias"):
        tie([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], Sharing(Pattern.parse("all", 2)))
    with pytest.raises(TenfoldError, match=r"weight is \(2, 2\) there and \(3, 2\) here"):
        tie([nn.Linear(2, 2), nn.Linear(2, 3)], Sharing(Pattern.parse("all", 2)))


def test_segments_are_single_layers_where_nothing_is_shared():
    pattern = Pattern([0, 0, 1, 2, 1])
    assert Sharing(pattern).segments() == [range(0, 2), range(2, 5)]
    assert Sharing(pattern, ()).segments() == [range(layer, layer + 1) for layer in range(5)]


def test_sharing_less_of_a_layer_is_a_refinement_and_more_is_not():
    pattern = Pattern.parse("all", 4)
    Sharing(pattern, ("ffn",)).check_refines(Sharing(pattern), "here")
    with pytest.raises(TenfoldError, match="here: attention"):
        Sharing(pattern).check_refines(Sharing(pattern, ("ffn",)), "here")


def test_ties_outlive_the_meta_device():
    with torch.device("meta"):
        model = Decoder(ModelConfig(vocab_size=50, layers=4, hidden=16, heads=2), 32)
    tie(model.layers, Sharing(Pattern([0, 0, 1, 0])))
    stored = len(list(model.parameters()))
    materialize(model, torch.device("cpu"))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert len(list(model.parameters())) == stored
    assert all(tied_pattern(column) == Pattern([0, 0, 1, 0]) for column in tables(model.layers).values())
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == stored


@pytest.mark.parametrize("parts", [("attention",), ("experts", "router"), ("norms",)])
def test_sharing_a_part_is_the_same_function_as_equal_weights(mixture, parts):
    shared, free = mixture("all", parts=parts), mixture("none")
    for mine, theirs in zip(free.layers, shared.layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    free.load_state_dict({n: p for n, p in shared.state_dict().items() if not n.startswith("layers.")}, strict=False)
    tokens = torch.arange(14).view(2, 7)
    for model in (shared, free):
        model(tokens)[0].square().sum().backward()
    assert torch.equal(shared(tokens)[0], free(tokens)[0])
    each = tables(free.layers)
    for name, column in tables(shared.layers).items():
        for holder in column[:1] if tied_pattern(column).stored_blocks == 1 else column:
            same = [other for mine, other in zip(column, each[name], strict=True) if mine.parameter is holder.parameter]
            if holder.parameter.requires_grad:
                total = torch.stack([other.parameter.grad for other in same]).sum(0)
                torch.testing.assert_close(holder.parameter.grad, total)
