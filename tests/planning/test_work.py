"""The work of a step: operations as the model's own count has them, exchanges as real ranks make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ranks import on_ranks
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import backward, make_example
from tenfold.nn.recompute import Recompute
from tenfold.parallel.mesh import degrees_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate, Operation
from tenfold.planning.work import RankWork, totals, work_of
from tenfold.sharing.tying import tie

DENSE = {"vocab_size": 64, "layers": 4, "hidden": 16, "heads": 4, "ffn": 24}
MIXTURE = DENSE | {
    "kv_heads": 2,
    "qk_norm": True,
    "tie_embeddings": False,
    "moe": {"experts": 8, "prototypes": 2, "top_k": 1, "ffn": 12, "shared_experts": 1, "balance_loss": 0.01},
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "GELU, biases, learned positions": DENSE
    | {"activation": "gelu", "bias": True, "norm": "layernorm", "positions": "learned"},
    "factorised embedding": DENSE | {"embedding_width": 8, "tie_embeddings": False},
    "encoder": DENSE | {"objective": "masked", "mask_token": 63, "norm_position": "post", "mask_share": 0.25},
    "grouped queries": DENSE | {"kv_heads": 1, "head_dim": 8},
    "mixture": MIXTURE,
    "mixture, two of each prototype": MIXTURE | {"moe": {**MIXTURE["moe"], "top_k": 2, "shared_experts": 0}},
}


def run_of(
    model: dict[str, Any],
    stage: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    batch: int = 8,
    micro: int = 4,
    **training: Any,
) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"sequence_length": 16},
        "training": {
            "steps": 5,
            "batch_size": batch,
            "micro_batch_size": micro,
            "precision": "fp32",
            "device": "cpu",
            **training,
        },
        "parallel": {"data_replicate": 1, "data_shard": 1, **(parallel or {})},
        "stages": [stage or {}],
    }


def candidate_of(config: RunConfig, ranks: int) -> Candidate:
    """How the run file itself says that it is to be run."""
    parallel, training = config.parallel, config.training
    degrees = degrees_of(parallel, ranks, config.model)
    assert degrees is not None
    return Candidate(
        degrees,
        training.micro_batch_size,
        training.recompute,
        training.recompute_layers,
        parallel.pipeline_schedule,
        parallel.pipeline_chunks,
        parallel.pipeline_slices,
        parallel.reshard,
        parallel.gather,
    )


@pytest.mark.parametrize("sharing", ["none", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_alone_computes_what_the_model_counts(name: str, sharing: str) -> None:
    config = build(RunConfig, run_of(MODELS[name], {"sharing": sharing}), "run.toml")
    (stage,) = plan_stages(config)
    (work,) = work_of(config, stage, candidate_of(config, 1))
    with torch.device("meta"):
        model = Decoder(config.model, 16)
    tie(model.layers, stage.sharing)
    assert work.flops == pytest.approx(count(model, 16).flops_per_token * 8 * 16)


@pytest.mark.parametrize("experts", ["layer", "prototype"])
def test_experts_that_share_are_a_dense_layer(experts: str) -> None:
    config = build(RunConfig, run_of(MIXTURE, {"sharing": "all", "experts": experts}), "run.toml")
    (stage,) = plan_stages(config)
    (work,) = work_of(config, stage, candidate_of(config, 1))
    with torch.device("meta"):
        model = Decoder(config.model, 16)
    tie(model.layers, stage.sharing)
    assert work.flops == pytest.approx(count(model, 16).flops_per_token * 8 * 16)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["dense", "GELU, biases, learned positions", "encoder", "factorised embedding"])
def test_what_recomputation_multiplies_again_is_what_pytorch_does(name: str, mode: Any, layers: int | None) -> None:
    given = {"recompute": mode} | ({"recompute_layers": layers} if layers and mode != "none" else {})
    config = build(RunConfig, run_of(MODELS[name], micro=8, **given), "run.toml")
    (stage,) = plan_stages(config)
    (work,) = work_of(config, stage, candidate_of(config, 1))
    products = [(item, count) for item, count in work.items() if isinstance(item, Operation) and item.kind == "matrix"]
    wanted = sum(item.flops * count for item, count in products)
    model = Decoder(config.model, 16, recompute=Recompute(mode, layers))
    example = make_example(torch.randint(0, 60, (8, 17)), config.model, 1, 0)
    # PyTorch does not count the product that the loss adds to a gradient in place.
    in_place: Any = {torch.ops.aten.addmm_: lambda _, one, other, **__: 2 * one[0] * one[1] * other[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        backward(model, example, torch.tensor(1.0), config.training.loss_chunk)
    counted = counter.get_flop_counts()["Global"]
    assert wanted == sum(flops for operator, flops in counted.items() if "mm" in str(operator))


class _Passes(TorchDispatchMode):
    """Bytes that operators which multiply no matrices read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or any(
            word in name for word in ("mm", "attention", "detach", "empty", "alias", "_unsafe_view")
        ):
            return out
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if not func._schema.name.endswith("_"):  # else it writes what it was given
            made = [each for each in made if all(each is not other for other in given)]
        self.bytes += sum(each.numel() * each.element_size() for each in (*given, *made))
        return out


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", ["dense", "GELU, biases, learned positions"])
def test_passes_over_memory_are_about_those_that_pytorch_makes(name: str, mode: Any) -> None:
    shape = MODELS[name] | {"hidden": 64, "ffn": 192, "layers": 2}
    config = build(RunConfig, run_of(shape, micro=8, recompute=mode), "run.toml")
    (stage,) = plan_stages(config)
    (work,) = work_of(config, stage, candidate_of(config, 1), fused=False)
    behind = {item.name for item in work.end if isinstance(item, Operation)}
    passes = [(item, count) for item, count in work.items() if isinstance(item, Operation) and item.kind == "memory"]
    wanted = sum(item.bytes * count for item, count in passes if item.name not in behind)
    model = Decoder(config.model, 16, recompute=Recompute(mode))
    example = make_example(torch.randint(0, 60, (8, 17)), config.model, 1, 0)
    with _Passes() as seen:
        backward(model, example, torch.tensor(1.0), config.training.loss_chunk)
    assert wanted == pytest.approx(seen.bytes, rel=0.15)


# ranks, degrees, and what of a run each is tried with: (model, stage, what differs in training, and in parallel)
ONE: tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]] = ("dense", {}, {}, {})
ALL = ("dense", {"sharing": "all"}, {}, {})
EXPERTS = ("mixture", {}, {}, {})
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]]] = {
    "shard": (
        2,
        {"data_shard": 2},
        [
            ONE,
            ALL,
            EXPERTS,
            ("dense", {"sharing": {"cycle": 2}}, {}, {"reshard": "backward"}),
            ("dense", {"sharing": "all", "parts": ["attention"]}, {}, {"reshard": "step"}),
            ("dense", {}, FULL, {}),
            ("dense", {}, {}, {"gather": "bf16"}),
            ("factorised embedding", {"sharing": "sandwich"}, {}, {}),
        ],
    ),
    "replicate": (2, {"data_replicate": 2}, [ONE, ALL]),
    "tensor": (
        2,
        {"tensor": 2},
        [
            ONE,
            ALL,
            EXPERTS,
            ("encoder", {}, {}, {}),
            *((model, {}, mode, {}) for model in ("dense", "mixture", "encoder") for mode in (FULL, SELECTIVE)),
            ("GELU, biases, learned positions", {}, FULL, {}),
            ("factorised embedding", {}, {}, {}),
            ("mixture", {"sharing": "all", "experts": "prototype"}, {}, {}),
        ],
    ),
    "context": (2, {"context": 2}, [ONE, EXPERTS, ("dense", {}, FULL, {}), ("dense", {}, SELECTIVE, {})]),
    "expert": (2, {"data_shard": 2, "expert": 2}, [EXPERTS, ("mixture", {}, FULL, {}), ("mixture", {}, SELECTIVE, {})]),
    "pipeline": (
        2,
        {"pipeline": 2},
        [
            ONE,
            ALL,
            ("dense", {}, {"micro_batch_size": 2}, {"pipeline_schedule": "gpipe"}),
            ("dense", {}, {"micro_batch_size": 2}, {"pipeline_schedule": "interleaved-1f1b"}),
            ("dense", {}, {"micro_batch_size": 2}, {"pipeline_schedule": "interleaved-zero-bubble"}),
            ("dense", {}, {"micro_batch_size": 2}, {"pipeline_schedule": "zbv"}),
            ("dense", {}, {}, {"pipeline_schedule": "terapipe", "pipeline_slices": 4}),
        ],
    ),
    "replicate x shard": (4, {"data_replicate": 2, "data_shard": 2}, [ONE, ALL]),
    "grid": (4, {"tensor": 4, "tensor_grid": True}, [ONE, ("dense", {}, FULL, {}), ("dense", {}, SELECTIVE, {})]),
    "shard x expert": (4, {"data_shard": 4, "expert": 2}, [EXPERTS, ("mixture", {"sharing": "all"}, {}, {})]),
    "expert x tensor": (4, {"data_shard": 2, "tensor": 2, "expert": 2}, [EXPERTS, ("mixture", {}, FULL, {})]),
    "shard x pipeline": (4, {"data_shard": 2, "pipeline": 2}, [ONE, ("mixture", {"sharing": "all"}, {}, {})]),
    "tensor x context": (4, {"tensor": 2, "context": 2}, [ONE, EXPERTS]),
}


QUICK = ("shard", "tensor", "expert", "pipeline")


@pytest.mark.parametrize(
    "layout",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_exchanges_are_those_of_real_ranks(layout: str) -> None:
    ranks, degrees, tried = LAYOUTS[layout]
    raws = []
    for model, stage, training, parallel in tried:
        micro = 4 if degrees.get("data_shard", 1) * degrees.get("data_replicate", 1) == 1 else 2
        if degrees.get("data_shard", 1) * degrees.get("data_replicate", 1) == 4:
            micro = 1
        raws.append(
            run_of(MODELS[model], stage, {**degrees, **parallel}, micro=training.get("micro_batch_size", micro))
        )
        raws[-1]["training"] |= training
    raws.append(raws[0] | {"optim": {"name": "adafactor"}})
    tried = [*tried, tried[0]]
    found = on_ranks(ranks, "planning.cases_work:exchanged", raws)
    for number, (raw, what) in enumerate(zip(raws, tried, strict=True)):
        config = build(RunConfig, raw, "run.toml")
        (stage_of_run,) = plan_stages(config)
        candidate = candidate_of(config, ranks)
        per_rank = ranks // candidate.degrees.pipeline
        for pipeline, work in enumerate(work_of(config, stage_of_run, candidate)):
            mine = [each[number] for each in found[pipeline * per_rank : (pipeline + 1) * per_rank]]
            routed = config.model.moe.experts > 0 and candidate.degrees.expert > 1
            assert not differences(by_kind(work), mine, routed, candidate.degrees.tensor > 1), (what, pipeline)


def by_kind(work: RankWork) -> dict[str, tuple[int, float]]:
    """Calls and bytes, along all axes."""
    found: dict[str, tuple[int, float]] = {}
    for (kind, _), (calls, size) in totals([work]).items():
        so_far = found.get(kind, (0, 0.0))
        found[kind] = so_far[0] + calls, so_far[1] + size
    return found


def differences(
    wanted: dict[str, tuple[int, float]], seen: list[dict[str, list[float]]], routed: bool, padded: bool
) -> list[str]:
    """How ranks differ from what is wanted. With experts of other ranks it hangs on the router how many rows each of
    them gets: over all ranks they are those that are sent. With tensor ranks they are padded besides."""
    told = []
    for kind in sorted({*wanted, *(kind for each in seen for kind in each)}):
        calls, size = wanted.get(kind, (0, 0.0))
        had = [each.get(kind, [0, 0.0]) for each in seen]
        sizes = [each[1] for each in had]
        if any(each[0] != calls for each in had):
            told.append(f"{kind}: {[each[0] for each in had]} calls, not {calls}")
        if routed and kind == "all_to_all":
            alike = sum(sizes) == pytest.approx(size * len(sizes))
        else:
            alike = (routed and padded) or sizes == [pytest.approx(size)] * len(sizes)
        if not alike:
            told.append(f"{kind}: {sizes} bytes, not {size}")
    return told
