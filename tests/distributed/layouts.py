"""The table of the proof: layouts, models, how layers share, and into how many micro-batches a rank cuts its samples.

docs/parallel.md shows it, made by `python tests/distributed/layouts.py`.
"""

from __future__ import annotations

from typing import Any

# name -> (ranks, degrees); those of eight ranks are slow
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
        {"name": "half", "sharing": {"groups": 2}, "until": {"steps": 4}},
        {"name": "real", "sharing": "none"},
    ],
}

PASSES = (1, 2)


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
    "adafactor": ("dense", {"optim": {"name": "adafactor"}}),
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
}

SINGLE = ("replicate", "shard", "tensor", "context", "expert", "pipeline")
"""The layouts of one axis."""

REFUSED = (
    {("adafactor", axis): "does not train on several ranks" for axis in SINGLE}
    | {(feature, axis): "needs one rank" for feature in ("moments: measure", "until: auto") for axis in SINGLE}
    | {("muon", "tensor"): "whole matrices"}
)
"""What is refused, with a message that says so: (feature, layout) -> words of it."""

LOOSER = {"muon": 300.0, "precision bf16": 3000.0, "gather bf16": 3000.0}
"""What depends on the order of sums by more than fp32 rounds, and so many times the tolerance of the others: Muon's
iteration in bf16 (one process that cuts a batch otherwise is off by 1e-3), and what is rounded to bf16 on the way."""

# Stages that lie otherwise than the one before, on four ranks: name -> (model, degrees of the three stages "delinked").
CHANGES: dict[str, tuple[str, list[dict[str, int]]]] = {
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
}


def feature_file(layout: str, feature: str) -> dict[str, Any]:
    """The run file of a feature."""
    model, changes = FEATURES[feature]
    raw = run_file(layout, model, "real", 1)
    for section, values in changes.items():
        raw[section] = {**raw[section], **values} if isinstance(values, dict) else values
    return raw


def change_file(change: str) -> dict[str, Any]:
    """The run file of a change of layouts."""
    model, degrees = CHANGES[change]
    raw = run_file("shard", model, "delinked", 1)
    raw["training"]["micro_batch_size"] = 2
    one = {"data_replicate": 1, "data_shard": 1, "tensor": 1, "context": 1, "expert": 1, "pipeline": 1}
    raw["stages"] = [
        {**stage, "parallel": {**one, **each}} for stage, each in zip(STAGES["delinked"], degrees, strict=True)
    ]
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


def entries(layout: str) -> list[tuple[str, str, int]]:
    """What a layout is proved with: (model, stages, micro-batches that a rank's samples are cut into).

    Eight processes go through all stages in one run.
    """
    unfit = "dense" if "expert" in layout else "mixture" if "grid" in layout or "tokens" in layout else None
    models = [model for model in MODELS if model != unfit]
    chosen = STAGES if LAYOUTS[layout][0] < 8 else ("delinked",)
    return [(model, stages, passes) for model in models for stages in chosen for passes in PASSES]


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
