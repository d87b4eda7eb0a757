"""What docs/library.md shows works as shown, Accelerate's recipe with resumption."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import tenfold

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")[1:]}


def code(section):
    (block,) = [text.removeprefix("python\n") for text in SECTIONS[section].split("```")[1::2]]
    return compile(block, f"docs/library.md, {section}", "exec")


def llama(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
                max_position_embeddings=16,
                bos_token_id=None,
                eos_token_id=None,
            )
        )


SAMPLES = [{"input_ids": (tokens := torch.arange(n, n + 8) * 7 % 50), "labels": tokens} for n in range(8)]
BATCHES = [{key: torch.stack([one[key], two[key]]) for key in one} for one, two in itertools.pairwise(SAMPLES)]


def stored(model):
    return len({layer.mlp.up_proj.weight for layer in model.model.layers})


def equal(mine, theirs):
    mine, theirs = mine.state_dict(), theirs.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


def by_hand(batches, delink_at):
    model = llama()
    tenfold.share(model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tenfold.divide_updates(model.model.layers, optimizer)
    for step, batch in enumerate(batches):
        if step == delink_at:
            tenfold.delink(model.model.layers, optimizer)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_loop_of_ones_own():
    model = llama()
    exec(code("A loop of your own"), {"model": model, "batches": BATCHES[:4]})
    assert stored(model) == 4
    assert equal(model, by_hand(BATCHES[:4], 2))


def test_state_below_the_device(tmp_path, capsys):
    plain, model, checkpoint = llama(), llama(), tmp_path / "checkpoint.pt"
    (tmp_path / "folder").mkdir()
    scope = {"model": model, "batches": BATCHES[:3], "folder": tmp_path / "folder", "checkpoint": checkpoint}
    exec(code("State below the device"), {**scope, "budget": 170_000})
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in BATCHES[:3]:
        plain(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert equal(model, plain)
    assert "moments disk" in capsys.readouterr().out
    saved = torch.load(checkpoint)
    again = llama(seed=1)
    again.load_state_dict(saved["model"])
    assert equal(again, plain)
    assert all(
        torch.equal(value, saved["optimizer"]["state"][number][key])
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    )


def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    model, seen = llama(), []
    model.register_forward_pre_hook(lambda *_: seen.append(stored(model)))
    exec(code("The Trainer of transformers"), {"model": model, "arguments": arguments, "dataset": SAMPLES})
    assert seen == [1, 4, 4, 4, 4]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.seen = llama(), []

        def training_step(self, batch, _):
            self.seen.append(stored(self.model))
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    module, loader = Module(), torch.utils.data.DataLoader(SAMPLES, batch_size=2)
    exec(code("Lightning"), {"module": module, "loader": loader, "options": options})
    assert module.seen == [1, 4, 4, 4, 4]


def test_accelerate_and_going_on_from_any_checkpoint(tmp_path):
    pytest.importorskip("accelerate")

    def run(start, seed=0):
        model: nn.Module = llama(seed)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=2)
        scope = {"model": model, "loader": loader, "start": start, "delink_at": 2, "folder": str(tmp_path)}
        exec(code("Accelerate"), scope)
        return model

    whole = copy.deepcopy(run(0))
    batches = [{key: torch.stack([SAMPLES[n][key], SAMPLES[n + 1][key]]) for key in SAMPLES[n]} for n in range(0, 8, 2)]
    assert equal(whole, by_hand(batches, 2))
    for start in (1, 2, 3):
        assert equal(run(start, seed=1), whole), start


def test_files_that_are_linked_exist():
    for link in PAGE.split("](")[1:]:
        assert (Path(__file__).parents[1] / "docs" / link.split(")")[0].partition("#")[0]).exists()
