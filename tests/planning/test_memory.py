"""What a stage is said to need of memory is what real steps take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from planning.cases_memory import peak_of
from ranks import on_ranks
from tenfold.config.load import build
from tenfold.config.offload import key_of
from tenfold.config.run import RunConfig
from tenfold.config.units import AXES
from tenfold.offload.placement import explicit
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.planning.memory import RankMemory, memory_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.planning.tracing import trace
from tenfold.sharing.delinking import delink
from tenfold.training.offloading import Tiers, begin_stage
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import layout_of
from tenfold.training.step import train_step

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"vocab_size": 300, "layers": 5, "hidden": 64, "heads": 4, "ffn": 160}
GPT2 = {**LLAMA, "norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True}
BERT = {**LLAMA, "objective": "masked", "mask_token": 3, "norm_position": "post", "embedding_width": 32}
MIXTURE = {**LLAMA, "moe": {"experts": 8, "ffn": 64, "top_k": 2, "shared_experts": 1}}


def run_file(model: dict[str, Any], stage: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    optim = {"name": training.pop("optim", "adamw"), "state": training.pop("state", "fp32")}
    length = training.pop("length", 64)
    return {
        "model": model,
        "data": {"sequence_length": length},
        "training": {"steps": 9, "batch_size": 8, "precision": "fp32", "device": "cpu", **training},
        "optim": optim,
        "stages": [stage or {"sharing": "none"}],
    }


SHARED: dict[str, Any] = {"sharing": "all"}
CASES: dict[str, dict[str, Any]] = {
    "llama": run_file(LLAMA),
    "a long sequence": run_file(LLAMA, batch_size=1, length=512),
    "micro-batches": run_file(LLAMA, micro_batch_size=2),
    "full": run_file(LLAMA, recompute="full"),
    "full, some layers": run_file(LLAMA, recompute="full", recompute_layers=2, micro_batch_size=4),
    "selective": run_file(LLAMA, recompute="selective"),
    "shared": run_file(LLAMA, SHARED),
    "shared, micro-batches": run_file(LLAMA, SHARED, micro_batch_size=2, recompute="full"),
    "shared in twos": run_file({**LLAMA, "layers": 6}, {"sharing": {"groups": 3}}, batch_size=1, optim="muon"),
    "a cycle": run_file({**LLAMA, "layers": 6}, {"sharing": {"cycle": 2}}, batch_size=1),
    "attention shared": run_file(LLAMA, {"sharing": "all", "parts": ["attention"]}, recompute="full"),
    "differences": run_file(LLAMA, {"sharing": "all", "rank": 4}),
    "gpt2": run_file(GPT2),
    "gpt2, bf16": run_file(GPT2, precision="bf16"),
    "bf16, selective": run_file(LLAMA, precision="bf16", recompute="selective"),
    "bert": run_file(BERT),
    "adafactor, few tokens": run_file(LLAMA, batch_size=1, length=8, optim="adafactor"),
    "muon, few tokens": run_file(LLAMA, batch_size=1, length=8, optim="muon"),
    "shared, few tokens": run_file(LLAMA, SHARED, batch_size=1, length=8),
    "mixture": run_file(MIXTURE),
    "mixture, full": run_file(MIXTURE, recompute="full"),
    "mixture, selective, micro-batches": run_file(MIXTURE, recompute="selective", micro_batch_size=4),
    "experts shared": run_file(MIXTURE, {"sharing": "all", "experts": "layer"}),
}


def foreseen(raw: dict[str, Any], **more: Any) -> RankMemory:
    config = build(RunConfig, raw, "run.toml")
    training, stage = config.training, plan_stages(config)[0]
    micro = training.micro_batch_size or stage.batch_size
    candidate = Candidate(
        micro_batch_size=micro, recompute=training.recompute, recompute_layers=training.recompute_layers
    )
    (found,) = memory_of(config, stage, candidate, device="cpu", **more)
    return found


def taken(raw: dict[str, Any]) -> int:
    """The most bytes that tensors have in the second step of a real run, by PyTorch's profiler."""
    config = build(RunConfig, raw, "run.toml")
    stage = plan_stages(config)[0]
    layout = layout_of(config, stage.sharing, Mesh(Degrees(), "cpu"), CPU)
    tiers = Tiers([config.offload], CPU, 0, 1, print)
    begun = begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers)
    model, optimizers = begun.model, begun.optimizers
    for step in range(2):
        batch = torch.randint(config.model.vocab_size or 0, (stage.batch_size, config.data.sequence_length + 1))
        # Where a CPU has a unit for bf16, oneDNN's products take room of their own.
        plain = torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-untyped-call]
        with plain, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            train_step(model, optimizers, batch, step + 1, 1e-3, config, 0, 1, layout, begun.offload)
    held = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return peak_of(seen)[0] + sum(each.nbytes for each in [*model.parameters(), *(each for each in held if each.dim())])


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_is_foreseen(case: str) -> None:
    raw = CASES[case]
    found, real = foreseen(raw), taken(raw)
    assert found.needed == pytest.approx(real, rel=0.005)


LARGE = {"vocab_size": 4096, "layers": 4, "hidden": 512, "heads": 8, "ffn": 1536}
RESIDENT: dict[str, dict[str, Any]] = {
    "kept": run_file(LARGE, length=256),
    "recomputed, shared": run_file(LARGE, SHARED, recompute="full", length=512),
    "mixture": run_file({**LARGE, "moe": {"experts": 8, "ffn": 512}}, micro_batch_size=4, length=256),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESIDENT)
def test_a_process_grows_by_what_is_foreseen(case: str) -> None:
    raw = RESIDENT[case]
    command = [sys.executable, str(Path(__file__).parent / "measured.py"), json.dumps(raw)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert foreseen(raw).needed == pytest.approx(json.loads(told.splitlines()[-1])["peak"], rel=0.1)


@pytest.mark.slow
def test_a_process_with_moments_on_disk_grows_by_what_is_foreseen(tmp_path: Path) -> None:
    raw = run_file(LARGE, batch_size=2, length=256, recompute="full")
    raw["offload"] = {"placement": [{"layers": "all", "moments": "disk"}], "disk": [str(tmp_path)]}
    rules = build(RunConfig, raw, "run.toml").offload.placement
    found = foreseen(raw, placement=[explicit(rules, foreseen(raw).parts, LARGE["layers"])])
    command = [sys.executable, str(Path(__file__).parent / "measured.py"), json.dumps(raw)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert found.needed == pytest.approx(json.loads(told.splitlines()[-1])["peak"], rel=0.1)
    assert found.tiers["disk"] == sum(part.bytes["moments"] for part in found.parts)


def test_a_delinking_in_place_takes_what_is_foreseen() -> None:
    raw = run_file(LLAMA)
    raw["stages"] = [{"name": "pseudo", "sharing": "all", "until": {"steps": 4}}, {"name": "real", "sharing": "none"}]
    config = build(RunConfig, raw, "run.toml")
    first, second = plan_stages(config)
    layout = layout_of(config, first.sharing, Mesh(Degrees(), "cpu"), CPU)
    model = layout.build(1)
    optimizers = build_optimizers(model, config.optim)
    state = 3 * sum(each.nbytes for each in model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        delink(model.layers, optimizers, second.sharing, "rescale", 1)
    (found,) = memory_of(config, second, Candidate(micro_batch_size=8), device="cpu")
    assert found.peaks["delinking"] == pytest.approx(state + peak_of(seen)[0], rel=0.05)
    assert "delinking" not in memory_of(config, first, Candidate(micro_batch_size=8), device="cpu")[0].peaks


def test_what_was_traced_once_serves_all_that_differ_in_ranks_and_depth() -> None:
    """Many layers take as many traces as few, and neither shards nor who has a layer make another."""
    candidates = [
        Candidate(Degrees(data_shard=shard, pipeline=pipeline), micro, "full")
        for shard in (1, 2, 4, 8)
        for pipeline in (1, 2, 4)
        for micro in (1, 2, 4, 8)
    ]
    made = []
    for layers in (12, 48):
        raw = run_file({**LLAMA, "layers": layers, "hidden": 1024, "heads": 16, "ffn": 4096}, batch_size=256)
        config = build(RunConfig, raw, "run.toml")
        (stage,) = plan_stages(config)
        before = trace.cache_info().misses
        for candidate in candidates:
            memory_of(config, stage, candidate)
        made.append(trace.cache_info().misses - before)
    assert made[0] == made[1] < len(candidates), made


RANKED = {**LLAMA, "layers": 4}
SPARSE = {**RANKED, "moe": {"experts": 8, "ffn": 64, "top_k": 2}}
FEW: dict[str, Any] = {"batch_size": 4, "length": 16}
PIPED: dict[str, Any] = {"pipeline": 2}
ON_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shards": (run_file(RANKED), {"data_shard": 2}),
    "shards, micro-batches": (run_file(RANKED, micro_batch_size=2), {"data_shard": 2}),
    "shards, full": (run_file(RANKED, recompute="full"), {"data_shard": 2}),
    "shards, shared": (run_file(RANKED, SHARED), {"data_shard": 2}),
    "shards, in twos": (run_file(RANKED, {"sharing": {"groups": 2}}), {"data_shard": 2}),
    "few tokens": (run_file(RANKED, micro_batch_size=1, **FEW), {"data_shard": 2}),
    "let go backward": (run_file(RANKED, micro_batch_size=1, **FEW), {"data_shard": 2, "reshard": "backward"}),
    "let go behind the step": (run_file(RANKED, micro_batch_size=1, **FEW), {"data_shard": 2, "reshard": "step"}),
    "gathered in bf16": (run_file(RANKED, **FEW), {"data_shard": 2, "gather": "bf16"}),
    "replicas": (run_file(RANKED, micro_batch_size=1, **FEW), {"data_replicate": 2}),
    "tensor": (run_file(RANKED), {"tensor": 2}),
    "context": (run_file(RANKED), {"context": 2}),
    "experts": (run_file(SPARSE), {"data_shard": 2, "expert": 2}),
    "experts, selective": (run_file(SPARSE, recompute="selective"), {"data_shard": 2, "expert": 2}),
    "pipeline": (run_file(RANKED, micro_batch_size=2), PIPED),
    "pipeline, full": (run_file(RANKED, micro_batch_size=2, recompute="full"), PIPED),
    "gpipe": (run_file(RANKED, micro_batch_size=2), PIPED | {"pipeline_schedule": "gpipe"}),
    "interleaved": (run_file(RANKED, micro_batch_size=2), PIPED | {"pipeline_schedule": "interleaved-1f1b"}),
    "zbv": (run_file(RANKED, micro_batch_size=2), PIPED | {"pipeline_schedule": "zbv"}),
    "terapipe": (
        run_file(RANKED, micro_batch_size=4),
        PIPED | {"pipeline_schedule": "terapipe", "pipeline_slices": 4},
    ),
}
LOOSER = {"zbv": 0.12, "terapipe": 0.12}
"""Where gradients are put off, or come slice by slice, less is counted than is there."""


def test_ranks_take_what_is_foreseen() -> None:
    one = {"data_replicate": 1, "data_shard": 1}
    raws = [raw | {"parallel": one | parallel} for raw, parallel in ON_RANKS.values()]
    answers = on_ranks(2, "planning.cases_memory:taken", raws)
    wrong = {}
    for number, (case, raw) in enumerate(zip(ON_RANKS, raws, strict=True)):
        config = build(RunConfig, raw, "run.toml")
        (stage,), asked, training = plan_stages(config), config.parallel, config.training
        degrees = Degrees(**{axis: int(getattr(asked, axis)) for axis in AXES})
        candidate = Candidate(
            degrees,
            training.micro_batch_size or stage.batch_size // degrees.data,
            training.recompute,
            schedule=asked.pipeline_schedule,
            slices=asked.pipeline_slices,
            reshard=asked.reshard,
            gather=asked.gather,
        )
        for found in memory_of(config, stage, candidate, device="cpu"):
            real = max(answer[number][1] for answer in answers if answer[number][0] == found.pipeline_rank)
            if abs(found.needed / real - 1) > LOOSER.get(case, 0.05):
                wrong[case, found.pipeline_rank] = found.needed, real
    assert not wrong
