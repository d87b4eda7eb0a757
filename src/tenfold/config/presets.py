"""Named model shapes. Those of M6 are from the papers (M6-T, arXiv 2105.15082; M6-10T, arXiv 2110.03888)."""

from __future__ import annotations

from typing import Any

_GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
    "tie_embeddings": True,
}
_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "tie_embeddings": False,
}
# BERT (arXiv 1810.04805) and ALBERT (arXiv 1909.11942), without token types, which only sentence pairs need.
_BERT: dict[str, Any] = {
    **_GPT2,
    "objective": "masked",
    "norm_position": "post",
    "norm_eps": 1e-12,
    "embedding_norm": True,
    "max_positions": 512,
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "ffn": 3072,
}
# M6 reads the vocabulary of the Chinese BERT. Where the papers do not tell the number of prototypes it is 1.
_M6: dict[str, Any] = {**_GPT2, "vocab_size": 21128, "max_positions": 1024, "hidden": 1024, "heads": 16}


def _m6(layers: int, experts: int, ffn: int, prototypes: int = 1) -> dict[str, Any]:
    moe = {"experts": experts, "prototypes": prototypes, "top_k": 1}
    return {**_M6, "layers": layers, "ffn": ffn, "moe": moe}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_LLAMA, "layers": 6, "hidden": 256, "heads": 4, "ffn": 704, "tie_embeddings": True, "init_std": 0.05},
    "moe-tiny": {
        **_LLAMA,
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "ffn": 384,
        "tie_embeddings": True,
        "init_std": 0.05,
        "moe": {"experts": 8, "prototypes": 2, "top_k": 1, "balance_loss": 0.01},
    },
    "gpt2-124m": {
        **_GPT2,
        "vocab_size": 50257,
        "max_positions": 1024,
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "ffn": 3072,
    },
    "llama-160m": {**_LLAMA, "vocab_size": 32000, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072},
    "bert-base": {**_BERT, "vocab_size": 30522},
    "albert-base": {**_BERT, "vocab_size": 30000, "embedding_width": 128},
    "m6-base": _m6(layers=5, experts=32, ffn=4096),
    "m6-10b": _m6(layers=10, experts=128, ffn=4096),
    "m6-100b": _m6(layers=24, experts=512, ffn=4096),
    "m6-1t": _m6(layers=24, experts=960, ffn=21248),
    "m6-10t": _m6(layers=48, experts=10240, ffn=9984, prototypes=80),
}
