"""Speed of generation: with the cache of keys and values, without it, and Hugging Face's `generate` on the same shape.

A Llama-shaped model with random weights continues random prompts of half the length to the full length, greedily.
Without the cache it writes 16 tokens at three quarters of the length, which cost what the mean token costs. Each case
runs `--rounds` times, all in turn; the best round counts. Prints tokens written a second and the ratio to the uncached
path. Hugging Face's part needs `transformers` and is left out without it. Takes a few minutes.

    python benchmarks/generation.py [--lengths 128 512] [--batches 1 8] [--rounds 2]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from tenfold.config.model import ModelConfig
from tenfold.evaluation.generation import generate_batch
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize

SHAPE = {"vocab_size": 8192, "layers": 8, "hidden": 384, "heads": 6, "kv_heads": 2, "ffn": 1024}


def ours(length: int) -> Decoder:
    """Our model, every layer of its own."""
    model = Decoder(ModelConfig(**SHAPE), [[layer] for layer in range(SHAPE["layers"])], length)
    initialize(model, 1)
    return model.eval()


def theirs(length: int) -> torch.nn.Module:
    """Hugging Face's Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["ffn"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        max_position_embeddings=length,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def cases(length: int, batch: int) -> dict[str, Callable[[], int]]:
    """What is measured at one length and batch size; each returns the tokens it wrote."""
    prompts = torch.randint(0, 8192, (batch, length // 2), generator=torch.Generator().manual_seed(0))
    new = length - length // 2
    model = ours(length)

    middle = torch.randint(0, 8192, (batch, 3 * length // 4 - 8), generator=torch.Generator().manual_seed(0))

    def write(start: torch.Tensor, count: int, cached: bool) -> int:
        written = generate_batch(model, start.tolist(), count, 0, batch_size=batch, cached=cached)
        return sum(1 for _ in written)

    found = {"uncached": lambda: write(middle, 16, False), "cached": lambda: write(prompts, new, True)}
    if importlib.util.find_spec("transformers"):
        peer = theirs(length)

        @torch.no_grad()
        def peer_write() -> int:
            out = peer.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False)
            assert out.shape[1] == length
            return new * batch

        found["transformers"] = peer_write
    return found


def main() -> None:
    """Run every case in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    table = Table("length", "batch", "case", "tokens/s", "ratio to uncached", box=None)
    for length in arguments.lengths:
        for batch in arguments.batches:
            best: dict[str, float] = {}
            measured = cases(length, batch)
            for _ in range(arguments.rounds):
                for name, run in measured.items():
                    began = time.monotonic()
                    tokens = run()
                    best[name] = max(best.get(name, 0.0), tokens / (time.monotonic() - began))
            for name, rate in best.items():
                table.add_row(str(length), str(batch), name, f"{rate:,.0f}", f"{rate / best['uncached']:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
