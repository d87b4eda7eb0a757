"""Layers traced without memory keep what real ones keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tenfold.config.model import ModelConfig
from tenfold.hardware.device import has_bf16_unit
from tenfold.nn.decoder import Decoder
from tenfold.nn.recompute import Recompute
from tenfold.offload.counted import saved_bytes
from tenfold.parallel.mesh import Degrees
from tenfold.planning.tracing import Traced, _direct, _named, trace

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "qk_norm": True, "tie_embeddings": False},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "bert": {"norm_position": "post", "objective": "masked", "mask_token": 3},
    "documents": {"document_end": 55},
    "mixture": {"moe": {"experts": 8, "prototypes": 2, "top_k": 2, "ffn": 24, "shared_experts": 1}},
    "gelu mixture": {"activation": "gelu", "moe": {"experts": 8, "ffn": 24}},
}


def traced(shape: str, mode: Any = "none", dtype: torch.dtype = torch.float32, length: int = 16, **more: Any) -> Traced:
    model = ModelConfig(vocab_size=90, layers=7, hidden=32, heads=4, ffn=40, **SHAPES[shape])
    what = {"parts": (), "rank": 0, "experts": "free", "degrees": Degrees(), "gathered": torch.float32, "chunk": 32}
    what |= {"accumulates": False, "bf16_unit": False, "cuda": False} | more
    return Traced(model=model, positions=48, mode=mode, dtype=dtype, length=length, **what)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("dtype", "length"), [(torch.float32, 16), pytest.param(torch.bfloat16, 48, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_kept_is_what_is_counted_on_fake_tensors(
    shape: str, dtype: torch.dtype, mode: Any, length: int
) -> None:
    what = traced(shape, mode, dtype, length, bf16_unit=has_bf16_unit())
    found = trace(what, 5)
    with torch.device("meta"):
        small = Decoder(what.model.model_copy(update={"layers": what.layers}), 48, dtype, Recompute(mode))
    counted = saved_bytes(small, 5, length, 32)
    kept = [phase.left for phase in found.forward]
    # Besides, counters of a few numbers, and LayerNorm's statistics, which a CPU keeps in bf16 where others do in fp32.
    few = 64 + (3 * 2 * 2 * 5 * length if dtype == torch.bfloat16 and shape == "gpt2" else 0)
    assert kept == pytest.approx(counted.layers, abs=few)


@pytest.mark.parametrize("chunk", [20, 32, 10_000], ids="chunks of {}".format)
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("shape", ["llama", "gpt2", "mixture"])
@pytest.mark.parametrize("parts", [(), ("attention", "ffn", "experts", "router", "norms")], ids=["own", "shared"])
def test_two_runs_tell_all_numbers_of_sequences(shape: str, mode: Any, parts: tuple[str, ...], chunk: int) -> None:
    if shape != "mixture":
        parts = tuple(part for part in parts if part not in ("experts", "router"))
    else:
        parts = tuple(part for part in parts if part != "ffn")
    what = traced(shape, mode, parts=parts, chunk=chunk)
    found, real = trace(what, 9), _named(what, _direct(what, 9))
    assert replace(found, loss=real.loss) == real
    assert found.loss == pytest.approx(real.loss, abs=64)  # what counts tokens


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(tensor=2),
        Degrees(tensor=4, grid=True),
        Degrees(context=2),
        Degrees(tensor=2, context=2),
        Degrees(expert=2),
        Degrees(tensor=2, expert=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", ["llama", "bert", "mixture"])
def test_ranks_that_split_a_layer_keep_their_part(shape: str, mode: Any, degrees: Degrees) -> None:
    if (shape == "mixture" and degrees.grid) or (shape != "mixture" and degrees.expert > 1):
        return
    alone, split = trace(traced(shape, mode), 4), trace(traced(shape, mode, degrees=degrees), 4)
    ranks = degrees.tensor * degrees.context
    whole, part = alone.forward[0].left, split.forward[0].left
    if mode == "full" and shape != "mixture":
        assert part == pytest.approx(whole / ranks, abs=600)
    elif mode == "full":  # who is sent where is kept too, and told to all tensor ranks
        assert whole / ranks <= part <= 2.5 * whole / ranks
    else:  # of what is gathered over tensor ranks each has more than its part, of what expert ranks exchange a copy
        assert whole / ranks * 0.9 <= part <= 1.9 * whole / ranks


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("sequences", [2, 7])
def test_many_prototypes_are_told_of_few(mode: Any, expert: int, sequences: int) -> None:
    moe = {"experts": 80, "prototypes": 20, "ffn": 64}
    model = ModelConfig.model_validate(
        {"vocab_size": 256, "layers": 3, "hidden": 64, "heads": 4, "ffn": 64, "moe": moe}
    )
    fp32 = torch.float32
    what = Traced(
        model, 64, (), 0, "free", Degrees(expert=expert), mode, fp32, fp32, 64, 64, True, bf16_unit=False, cuda=True
    )
    assert trace(what, sequences) == _named(what, _direct(what, sequences))
