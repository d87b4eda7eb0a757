"""The table of the proof: layouts, models, how layers share, and into how many micro-batches a rank cuts its samples.

docs/parallel.md shows it, made by `python tests/distributed/layouts.py`.
"""

from __future__ import annotations

import tempfile
from typing import Any

# name -> (ranks, degrees)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {"data_shard": 2}),
    "replicate": (2, {"data_replicate": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "expert": (2, {"data_shard": 2, "expert": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "pipeline by tokens": (2, {"pipeline": 2, "pipeline_schedule": "terapipe", "pipeline_slices": 4}),
    "replicate x pipeline": (4, {"data_replicate": 2, "pipeline": 2}),
    "replicate x shard": (4, {"data_replicate": 2, "data_shard": 2}),
    "shard x tensor": (4, {"data_shard": 2, "tensor": 2}),
    "shard x context": (4, {"data_shard": 2, "context": 2}),
    "shard x expert": (4, {"data_shard": 4, "expert": 2}),
    "shard x pipeline": (4, {"data_shard": 2, "pipeline": 2}),
    "tensor x context": (4, {"tensor": 2, "context": 2}),
    "tensor x expert": (4, {"data_shard": 2, "tensor": 2, "expert": 2}),
    "tensor x pipeline": (4, {"tensor": 2, "pipeline": 2}),
    "context x expert": (4, {"data_shard": 2, "context": 2, "expert": 4}),
    "context x pipeline": (4, {"context": 2, "pipeline": 2}),
    "expert x pipeline": (4, {"data_shard": 2, "expert": 2, "pipeline": 2}),
    "tensor grid": (4, {"tensor": 4, "tensor_grid": True}),
    "shard x tensor x pipeline": (8, {"data_shard": 2, "tensor": 2, "pipeline": 2}),
    "shard x context x tensor": (8, {"data_shard": 2, "context": 2, "tensor": 2}),
    "replicate x shard x tensor": (8, {"data_replicate": 2, "data_shard": 2, "tensor": 2}),
    "shard x tensor grid": (8, {"data_shard": 2, "tensor": 4, "tensor_grid": True}),
    "expert x tensor x pipeline": (8, {"data_shard": 2, "expert": 2, "tensor": 2, "pipeline": 2}),
    "replicate x expert x context": (8, {"data_replicate": 2, "data_shard": 2, "context": 2, "expert": 4}),
}

QUICK = ("replicate x shard", "tensor x context", "expert x pipeline")
"""Of the layouts of four ranks those that are not marked slow: between them they have every axis."""

# Nothing is even: 3 heads, 51 rows of the vocabulary, an embedding of 5 columns (of 4 shards of its rows one is empty).
DENSE: dict[str, Any] = {
    "vocab_size": 49,
    "vocab_multiple": 17,
    "layers": 4,
    "hidden": 24,
    "heads": 3,
    "ffn": 21,
    "embedding_width": 5,
    "bias": True,
    "norm": "layernorm",
    "positions": "learned",
    "init_std": 0.1,
}
MIXTURE: dict[str, Any] = {
    "vocab_size": 51,
    "vocab_multiple": 3,
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "qk_norm": True,
    "ffn": 20,
    "tie_embeddings": False,
    "init_std": 0.1,
    "moe": {
        "experts": 8,
        "prototypes": 2,
        "top_k": 1,
        "ffn": 12,
        "shared_experts": 1,
        "balance_loss": 0.02,
        "z_loss": 0.01,
        "bias_rate": 0.001,
    },
}
MODELS = {"dense": DENSE, "mixture": MIXTURE}

STAGES: dict[str, list[dict[str, Any]]] = {
    "real": [{"name": "real", "sharing": "none"}],
    "pseudo": [{"name": "pseudo", "sharing": "all"}],
    "delinked": [
        {"name": "pseudo", "sharing": "all", "until": {"steps": 2}},
        {"name": "half", "sharing": {"groups": 2}, "until": {"steps": 3}},
        {"name": "real", "sharing": "none"},
    ],
}

PASSES = (1, 2)


def below(layers: str, *kinds: str) -> dict[str, Any]:
    """The section of a run file that has kinds of state of some layers lie on disk."""
    rule = {"layers": layers, **dict.fromkeys(kinds, "disk")}
    return {"disk": [tempfile.gettempdir()], "placement": [rule]}


# What a run may ask besides: name -> (model, what differs in its run file). Each on two ranks along every axis.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("dense", {"model": {"objective": "masked", "mask_token": 48, "norm_position": "post"}}),
    "document masks": ("mixture", {"data": {"document_mask": True, "end_of_text": 3}}),
    "grouped-query attention": ("dense", {"model": {"heads": 6, "kv_heads": 2, "hidden": 24}}),
    "sandwich": ("dense", {"stages": [{"sharing": "sandwich"}]}),
    "cycle": ("mixture", {"stages": [{"sharing": {"cycle": 2}}]}),
    "parts: attention": ("dense", {"stages": [{"sharing": "all", "parts": ["attention"]}]}),
    "parts: experts": ("mixture", {"stages": [{"sharing": "all", "parts": ["experts"]}]}),
    "rank 2 differences": (
        "dense",
        {
            "stages": [
                {"name": "relaxed", "sharing": "all", "rank": 2, "until": {"steps": 3}},
                {"name": "real", "sharing": "none"},
            ]
        },
    ),
    "experts that share": (
        "mixture",
        {
            "stages": [
                {"name": "sets", "sharing": "all", "experts": "prototype", "until": {"steps": 3}},
                {"name": "real", "sharing": "all"},
            ]
        },
    ),
    "expert capacity": ("mixture", {"model": {"moe": {**MIXTURE["moe"], "capacity": "k", "capacity_factor": 1.0}}}),
    "recompute full": ("mixture", {"training": {"recompute": "full"}}),
    "recompute selective": ("mixture", {"training": {"recompute": "selective"}}),
    "sequences in pieces": ("dense", {"stages": [{"sharing": "none", "sequence_length": 8}]}),
    "updates not divided": ("dense", {"optim": {"divide_shared": False}, "stages": [{"sharing": "all"}]}),
    "infinity norm": ("dense", {"optim": {"norm": "inf", "clip": 0.05}}),
    "precision bf16": ("dense", {"training": {"precision": "bf16"}}),
    "gather bf16": ("dense", {"parallel": {"gather": "bf16"}}),
    "no clipping": ("dense", {"optim": {"clip": 0.0}}),
    "muon": ("dense", {"optim": {"name": "muon"}}),
    "adafactor": ("dense", {"optim": {"name": "adafactor"}, "stages": STAGES["delinked"]}),
    "adafactor, offload: weights, moments": (
        "mixture",
        {
            "optim": {"name": "adafactor"},
            "offload": below("all", "weights", "moments"),
            "training": {"micro_batch_size": 2},
            "stages": STAGES["delinked"],
        },
    ),
    "moments: measure": (
        "dense",
        {
            "stages": [
                {"name": "pseudo", "sharing": "all", "until": {"steps": 3}},
                {"name": "real", "sharing": "none", "moments": "measure"},
            ]
        },
    ),
    "until: auto": (
        "dense",
        {
            "stages": [
                {
                    "name": "pseudo",
                    "sharing": "all",
                    "until": {"auto": "correlation", "at_most": {"steps": 4}, "every": 1},
                },
                {"name": "real", "sharing": "none"},
            ]
        },
    ),
    "offload: weights, gradients, moments": (
        "mixture",
        {
            "offload": below("all", "weights", "gradients", "moments"),
            "training": {"micro_batch_size": 2},
            "stages": STAGES["delinked"],
        },
    ),
    "offload: weights, moments, activations": (
        "mixture",
        {
            "offload": below("all", "weights", "moments", "activations"),
            "training": {"micro_batch_size": 2},
            "stages": STAGES["delinked"],
        },
    ),
    # Of matrices of one row one of two shards is empty; those of 85 rows are cut in two, of which one is but padding.
    "offload: every second layer": (
        "dense",
        {
            "model": {"ffn": 85},
            "offload": below("every 2 from 1", "weights", "moments"),
            "stages": [
                {"name": "relaxed", "sharing": "all", "rank": 1, "until": {"steps": 3}},
                {"name": "real", "sharing": "none"},
            ],
        },
    ),
}

SINGLE = ("replicate", "shard", "tensor", "context", "expert", "pipeline")
"""The layouts of one axis."""

REFUSED = {(feature, axis): "needs one rank" for feature in ("moments: measure", "until: auto") for axis in SINGLE} | {
    ("muon", "tensor"): "whole matrices"
}
"""What is refused, with a message that says so: (feature, layout) -> words of it."""

LOOSER = {"muon": 300.0, "precision bf16": 3000.0, "gather bf16": 3000.0}
"""What depends on the order of sums by more than fp32 rounds, and so many times the tolerance of the others: Muon's
iteration in bf16 (one process that cuts a batch otherwise is off by 1e-3), and what is rounded to bf16 on the way."""

# Stages that lie otherwise than the one before, on four ranks: name -> (model, `parallel` of the three stages
# "delinked").
CHANGES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "shards, then tensor, then pipeline": (
        "dense",
        [{"data_shard": 4}, {"data_shard": 2, "tensor": 2}, {"data_shard": 2, "pipeline": 2}],
    ),
    "replicas, then experts x tensor, then experts x pipeline": (
        "mixture",
        [
            {"data_replicate": 4},
            {"data_shard": 2, "expert": 2, "tensor": 2},
            {"data_shard": 2, "expert": 2, "pipeline": 2},
        ],
    ),
    "pipeline, then context, then shards": (
        "mixture",
        [{"pipeline": 4}, {"context": 2, "tensor": 2}, {"data_shard": 4, "expert": 2}],
    ),
    "schedules, then ZeRO-1": (
        "dense",
        [
            {"pipeline": 2, "data_shard": 2, "pipeline_schedule": "gpipe"},
            {"pipeline": 2, "tensor": 2, "pipeline_schedule": "zbv"},
            {"data_shard": 4, "reshard": "step"},
        ],
    ),
}


def feature_file(layout: str, feature: str) -> dict[str, Any]:
    """The run file of a feature."""
    model, changes = FEATURES[feature]
    raw = run_file(layout, model, "real", 1)
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    return raw


def offload_file(layout: str, model: str, layers: str, *kinds: str, schedule: str = "1f1b") -> dict[str, Any]:
    """The run file of a run through all stages with kinds of state on disk."""
    raw = run_file(layout, model, "delinked", 2)
    return raw | {"offload": below(layers, *kinds), "parallel": {**raw["parallel"], "pipeline_schedule": schedule}}


def change_file(change: str) -> dict[str, Any]:
    """The run file of a change of layouts."""
    model, degrees = CHANGES[change]
    return between(model, degrees, STAGES["delinked"])


def between(model: str, degrees: list[dict[str, Any]], stages: list[dict[str, Any]]) -> dict[str, Any]:
    """The run file of `stages` of which each lies on four ranks by its `degrees`."""
    raw = run_file("shard", model, "delinked", 1)
    raw["training"]["micro_batch_size"] = 2
    one = {"data_replicate": 1, "data_shard": 1, "tensor": 1, "context": 1, "expert": 1, "pipeline": 1}
    raw["stages"] = [{**stage, "parallel": {**one, **each}} for stage, each in zip(stages, degrees, strict=True)]
    return raw


def features(layout: str) -> list[str]:
    """Those that say something of a layout: expert ranks need experts."""
    return [name for name, (model, _) in FEATURES.items() if model == "mixture" or layout != "expert"]


def run_file(layout: str, model: str, stages: str, passes: int) -> dict[str, Any]:
    """The run file of one entry, for its ranks; one rank runs the same without its `parallel` section."""
    _, degrees = LAYOUTS[layout]
    data = degrees.get("data_replicate", 1) * degrees.get("data_shard", 1)
    depth = degrees.get("pipeline", 1)
    batch = 8
    return {
        "model": MODELS[model],
        "data": {"sequence_length": 16},
        "training": {
            "steps": 5,
            "batch_size": batch,
            "micro_batch_size": batch // data // passes // depth,
            "precision": "fp32",
            "device": "cpu",
        },
        # A larger epsilon: with a small one AdamW turns the rounding of gradients near zero into whole steps.
        "optim": {"lr": 1e-2, "eps": 1e-3},
        "parallel": {"data_replicate": 1, "data_shard": 1, **degrees},
        "stages": STAGES[stages],
    }


def slow(layout: str) -> bool:
    """Whether only `make test` runs a layout."""
    return LAYOUTS[layout][0] > 2 and layout not in QUICK


def entries(layout: str) -> list[tuple[str, str, int]]:
    """What a layout is proved with: (model, stages, micro-batches that a rank's samples are cut into).

    Each goes through all stages, so that it has shared, half shared and freed layers, and what a delinking carries.
    Along one axis the samples of every model are cut into two micro-batches: in one, features show each axis with both
    models. On four ranks one run has one micro-batch and one has two: of the models one each, in turns from layout to
    layout; the only model does both. On eight ranks, whose pairs of axes four have shown, one model has two.
    """
    unfit = "dense" if "expert" in layout else "mixture" if "grid" in layout or "tokens" in layout else None
    models = [model for model in MODELS if model != unfit]
    turn = list(LAYOUTS).index(layout)
    if layout in SINGLE:
        return [(model, "delinked", 2) for model in models]
    if LAYOUTS[layout][0] == 8:
        return [(models[turn % len(models)], "delinked", 2)]
    return [(models[at % len(models)], "delinked", 1 + (turn + at) % 2) for at in range(2)]


def matrix() -> str:
    """Two tables in Markdown: which axes are proved together, and which features with each axis."""
    names = dict(zip(SINGLE, ("data_replicate", "data_shard", "tensor", "context", "expert", "pipeline"), strict=True))
    lines = ["| | " + " | ".join(SINGLE) + " |", "|---" * (len(SINGLE) + 1) + "|"]
    for mine in SINGLE:
        cells = []
        for other in SINGLE:
            found = [
                ranks
                for ranks, degrees in LAYOUTS.values()
                if degrees.get(names[mine], 1) > 1 and degrees.get(names[other], 1) > 1
            ]
            cells.append(f"on {min(found)}" if found else "not tried")
        lines.append(f"| **{mine}** | " + " | ".join(cells) + " |")
    lines += ["", "| | " + " | ".join(SINGLE) + " |", "|---" * (len(SINGLE) + 1) + "|"]
    for feature in FEATURES:
        cells = [
            "refused" if (feature, axis) in REFUSED else "equal" if feature in features(axis) else "" for axis in SINGLE
        ]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(matrix(), end="")
