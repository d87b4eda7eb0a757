"""`tenfold delink` on a checkpoint of chance of several gigabytes: seconds, and peak of resident memory."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tenfold.checkpoint.store import write_checkpoint
from tenfold.checkpoint.tensors import PIECE, Stored
from tenfold.config.model import ModelConfig
from tenfold.nn.decoder import Decoder
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

HIDDEN = 1024


def make(folder: Path, gigabytes: float, layers: int) -> int:
    """A checkpoint of layers that share one block, which with AdamW's state has so many gigabytes; its bytes."""
    ffn = round(gigabytes * 1e9 / 12 / (3 * HIDDEN))  # three matrices in fp32, and two moments of each
    config = ModelConfig(vocab_size=1024, layers=layers, hidden=HIDDEN, heads=16, ffn=ffn)
    with torch.device("meta"):
        model = Decoder(config, 128)
    sharing = Sharing(Pattern([0] * layers))
    tie(model.layers, sharing)
    generator = torch.Generator().manual_seed(0)

    def chance(elements: int) -> Iterator[Tensor]:
        for first in range(0, elements, PIECE):
            yield torch.rand(min(PIECE, elements - first), generator=generator)

    def stored(shape: tuple[int, ...]) -> Stored:
        elements = torch.Size(shape).numel()
        return Stored(torch.float32, shape, lambda: chance(elements))

    weights = {name: stored(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    state = {f"{name}/{key}": one for name, one in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    state |= {f"{name}/step": Stored.of(torch.tensor(100.0)) for name in weights}
    place = {**sharing.dump(), "model": config.model_dump(mode="json", exclude_none=True)}
    place |= {"sequence_length": 128, "precision": "fp32", "betas": [0.9, 0.95]}
    write_checkpoint(folder, 100, weights, state, place)
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 4.0], help="of the coarse checkpoint")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--moments", default="rescale")
    options = parser.parse_args()
    print("| checkpoint, GB | delinked, GB | seconds | peak memory, MB |\n|---|---|---|---|")
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "step-00000100", Path(folder) / "free"
            size = make(source, gigabytes, options.layers)
            command = ["-m", "tenfold", "delink", str(source), str(out), "--moments", options.moments]
            began = time.monotonic()
            child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            if status:
                raise SystemExit(f"tenfold delink ended with {status}")
            seconds = time.monotonic() - began
            made = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
            peak = usage.ru_maxrss * 1024 / 1e6
            print(f"| {size / 1e9:.2f} | {made / 1e9:.2f} | {seconds:.1f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
