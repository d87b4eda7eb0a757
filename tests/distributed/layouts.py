"""The table of the proof: layouts, models, how layers share, and into how many micro-batches a rank cuts its samples.

docs/parallel.md shows it, made by `python tests/distributed/layouts.py`.
"""

from __future__ import annotations

from typing import Any

# name -> (ranks, degrees); those of eight ranks are slow
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "shard": (2, {"data_shard": 2}),
    "replicate": (2, {"data_replicate": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "expert": (2, {"data_shard": 2, "expert": 2}),
    "pipeline": (2, {"pipeline": 2}),
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
    """What a layout is proved with: (model, stages, micro-batches that a rank's samples are cut into)."""
    unfit = "dense" if "expert" in layout else "mixture" if "grid" in layout else None
    models = [model for model in MODELS if model != unfit]
    return [(model, stages, passes) for model in models for stages in STAGES for passes in PASSES]
