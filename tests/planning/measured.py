"""A short run in a process of its own: prints the most memory that its steps took, in bytes. Run by `test_memory.py`.

python tests/planning/measured.py '{"model": ..., ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def measure(raw: dict[str, Any], steps: int = 3) -> dict[str, int]:
    """Train `steps` steps of the first stage of a run file: bytes resident at most, less those before there was a
    model.

    The C library gives back what is freed: what it would keep for later is not what a run needs.
    """
    import torch

    from tenfold.config.load import build
    from tenfold.config.offload import key_of
    from tenfold.config.run import RunConfig
    from tenfold.hardware.memory import memory_used_bytes, peak_memory_bytes, return_freed_memory
    from tenfold.parallel.mesh import Degrees, Mesh
    from tenfold.planning.stages import plan_stages
    from tenfold.training.offloading import Tiers, begin_stage
    from tenfold.training.setup import layout_of
    from tenfold.training.step import train_step

    config = build(RunConfig, raw, "run.toml")
    assert return_freed_memory()
    device = torch.device("cpu")
    torch.set_num_threads(1)
    stage = plan_stages(config)[0]
    _warm_up()
    before = memory_used_bytes(device)
    Path("/proc/self/clear_refs").write_text("5")
    tiers = Tiers([config.offload], device, 0, 1, lambda text: print(text, file=sys.stderr))
    layout = layout_of(config, stage.sharing, Mesh(Degrees(), "cpu"), device)
    begun = begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers)
    generator = torch.Generator().manual_seed(1)
    shape = (stage.batch_size, config.data.sequence_length + 1)
    for step in range(steps):
        batch = torch.randint(config.model.vocab_size or 0, shape, generator=generator)
        train_step(begun.model, begun.optimizers, batch, step + 1, 1e-3, config, 0, 1, layout, begun.offload)
    peak = peak_memory_bytes(device) - before
    tiers.close()
    return {"peak": peak, "before": before}


def _warm_up() -> None:
    """Have libraries take what they keep, before memory is looked at."""
    import torch

    from tenfold.config.model import ModelConfig
    from tenfold.config.run import OptimConfig
    from tenfold.nn.decoder import Decoder
    from tenfold.nn.objective import backward, next_token_example
    from tenfold.training.optimizers import build_optimizers

    model = Decoder(ModelConfig(vocab_size=64, layers=1, hidden=32, heads=2, ffn=64), 16)
    optimizers = build_optimizers(model, OptimConfig())
    backward(model, next_token_example(torch.zeros(2, 17, dtype=torch.int64)), torch.tensor(32), 16)
    optimizers[0].step()


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
