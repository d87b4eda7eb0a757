"""The same code on a CUDA device; skipped where there is none (`make test-gpu` runs these alone)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tenfold.cli.main import main
from tenfold.config.model import ModelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.grouped import feed_forward_rows
from tenfold.nn.init import initialize
from tenfold.nn.loss import cross_entropy_sum
from tenfold.nn.recompute import Mode, Recompute
from tenfold.reporting.metrics import read_metrics
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie
from training.conftest import PSEUDO_REAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.mark.parametrize("sharing", ["all", "none"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_and_gradients_equal_those_on_the_cpu(sharing: str, recompute: Mode) -> None:
    found = []
    for device in ("cpu", "cuda"):
        moe = {"experts": 4, "prototypes": 2, "balance_loss": 0.01}
        config = ModelConfig(layers=4, hidden=32, heads=2, ffn=64, vocab_size=100, qk_norm=True, moe=moe)
        model = Decoder(config, 32, torch.float32, Recompute(recompute))
        tie(model.layers, Sharing(Pattern.parse(sharing, 4)))
        initialize(model, 1)
        model.to(device)
        tokens = torch.randint(0, 100, (4, 33), generator=torch.Generator().manual_seed(0)).to(device)
        hidden, statistics = model(tokens[:, :-1])
        loss = cross_entropy_sum(hidden, model.output_weight, tokens[:, 1:], 100) + statistics[:, 0].sum()
        loss.backward()
        found.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cpu, cuda, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [[0, 5, 3, 0], [8, 0, 0, 0], [0, 0, 0, 8]])
def test_experts_in_bf16_equal_a_loop(rows: list[int]) -> None:
    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    x, gates = random(8, 64, dtype=torch.bfloat16), random(8)
    gate, up, down = random(4, 64, 32), random(4, 64, 32), random(4, 32, 64)
    y = feed_forward_rows(x, gates, gate, up, down, torch.tensor(rows, device="cuda"))
    experts = [expert for expert, count in enumerate(rows) for _ in range(count)]
    each = [
        gates[r] * (torch.nn.functional.silu(x[r].float() @ gate[e]) * (x[r].float() @ up[e])) @ down[e]
        for r, e in enumerate(experts)
    ]
    expected = torch.stack(each)
    inputs = (x, gates, gate, up, down)
    mine, theirs = (torch.autograd.grad(out.float().sum(), inputs) for out in (y, expected))
    for found, wanted in ((y, expected), *zip(mine, theirs, strict=True)):
        assert (found.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_trains_delinks_exactly_and_resumes(
    run_file: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    arguments = ["train", str(run_file()), "--training.device", "cuda", "--training.precision", precision]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    events = read_metrics(tmp_path / "run")
    assert [event["logits_equal"] for event in events if event["event"] == "delink"] == [True]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert losses[-1] < losses[0]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.parametrize("rules", ["all", "every 2"])
@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_run_whose_state_leaves_the_device_is_the_same(
    run_file: Callable[..., Path], tmp_path: Path, rules: str, below: str
) -> None:
    (tmp_path / "fast").mkdir()
    flags = ["--training.device", "cuda", "--training.precision", "fp32", "--training.micro-batch-size", "2"]
    runs = []
    for name in ("plain", "mine"):
        out = tmp_path / name
        path = run_file() if name == "plain" else run_file(stages=_offloaded(tmp_path, rules, below) + PSEUDO_REAL)
        assert main(["train", str(path), "--out", str(out), *flags]) == 0
        runs.append([event["loss"] for event in read_metrics(out) if event["event"] == "step"])
    assert runs[0] == runs[1]


def _offloaded(tmp_path: Path, layers: str, below: str) -> str:
    kinds = ", ".join(f"{kind} = '{below}'" for kind in ("weights", "gradients", "moments"))
    disk = f"disk = ['{tmp_path}/fast']" if below == "disk" else ""
    return f"[offload]\nhost_budget = '64MiB'\n{disk}\nplacement = [{{layers = '{layers}', {kinds}}}]\n"
