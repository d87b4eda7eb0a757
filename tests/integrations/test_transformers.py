"""Stages under the Trainer of transformers; stopped and resumed anywhere the weights are the same to the last bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.data import Dataset

import tenfold
from tenfold.errors import TenfoldError
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import tables, tied_pattern

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tenfold.integrations.transformers import SharingCallback  # noqa: E402

STAGES = [("30%", "all"), (4, {"groups": 2}), ("100%", "none")]  # of 6 steps: 2, 2, 2
KINDS = {"gpt2": "transformer.h", "mixtral": "model.layers"}


class Samples(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 9) * (index % 5 + 1) % 50
        return {"input_ids": tokens, "labels": tokens}


def make(kind="gpt2", seed=0):
    """A small model; GPT-2 with dropout, so that the state of random numbers counts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _make(kind)


def _make(kind):
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=16, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def trainer(folder, model, callback, model_init=None, **more):
    arguments = {
        "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "weight_decay": 0.1, "logging_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "seed": 3, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder), **{**arguments, **more})
    callbacks = [] if callback is None else [callback]
    return transformers.Trainer(
        model, args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks, model_init=model_init
    )


class Spy(transformers.TrainerCallback):
    """The pattern, and how many parameters the optimizer trains, at each step."""

    def __init__(self, kind):
        self.kind, self.seen = kind, []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        (pattern,) = {tied_pattern(column) for column in tables(model.get_submodule(KINDS[self.kind])).values()}
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        assert trained == set(model.parameters())
        assert set(optimizer.state) in (set(), trained)
        self.seen.append(pattern.stored_blocks)


@pytest.fixture(scope="module", params=list(KINDS))
def uninterrupted(request, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    run = trainer(folder, make(kind), SharingCallback(KINDS[kind], STAGES))
    spy = Spy(kind)
    run.add_callback(spy)
    run.train()
    return kind, folder, run, spy


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_stages_follow_one_another_and_the_optimizer_trains_what_the_model_has(uninterrupted):
    assert uninterrupted[3].seen == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_resumed_run_ends_with_the_same_weights_and_state_to_the_last_bit(uninterrupted, tmp_path, step):
    kind, folder, run, _ = uninterrupted
    again = trainer(tmp_path, make(kind, seed=1), SharingCallback(KINDS[kind], STAGES))
    spy = Spy(kind)
    again.add_callback(spy)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert spy.seen == [1, 1, 2, 2, 4, 4][step:]
    assert equal(weights(again.model), weights(run.model))
    mine, theirs = again.optimizer.state_dict(), run.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert all(torch.equal(value, mine["state"][number][key]) for key, value in state.items())


class ByHand(transformers.TrainerCallback):
    """What the callback should do, by step."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        tenfold.divide_updates(model.get_submodule(KINDS[self.kind]), optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        for step, pattern in ((2, {"groups": 2}), (4, "none")):
            if state.global_step == step:
                tenfold.delink(model.get_submodule(KINDS[self.kind]), optimizer, pattern)


def made_and_shared(kind):
    model = make(kind)
    tenfold.share(model.get_submodule(KINDS[kind]))
    return model


def test_the_run_is_share_and_delink_by_hand(uninterrupted, tmp_path):
    kind, _, run, _ = uninterrupted
    again = trainer(tmp_path, made_and_shared(kind), ByHand(kind), save_strategy="no")
    again.train()
    assert equal(weights(again.model), weights(run.model))


def test_checkpoints_of_shared_stages_are_smaller_and_name_the_layers_they_hold(uninterrupted):
    folder = uninterrupted[1]
    sizes = [(folder / f"checkpoint-{step}" / "model.safetensors").stat().st_size for step in (1, 3, 5)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_one_trainer_may_go_back_to_an_earlier_checkpoint(tmp_path):
    run = trainer(tmp_path, make(), SharingCallback(KINDS["gpt2"], STAGES))
    run.train()
    first = weights(run.model)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert equal(weights(run.model), first)


def test_the_best_model_is_loaded_as_it_was_shared(tmp_path):
    losses = itertools.chain([0.1], itertools.repeat(5.0))
    model = make()
    run = trainer(
        tmp_path, model, SharingCallback(KINDS["gpt2"], STAGES), load_best_model_at_end=True, eval_strategy="steps",
        eval_steps=1, metric_for_best_model="eval_loss",
    )  # fmt: skip
    run.evaluate = lambda *_, **__: {"eval_loss": next(losses)}
    run.train()
    assert {tied_pattern(column) for column in tables(model.transformer.h).values()} == {Pattern([0] * 4)}
    best = make(seed=2)
    tenfold.share(best.transformer.h)
    safetensors = pytest.importorskip("safetensors.torch")
    best.load_state_dict(safetensors.load_file(tmp_path / "checkpoint-1" / "model.safetensors"), strict=False)
    assert equal(weights(model), weights(best))


def test_parts_and_a_function_for_the_layers(tmp_path):
    model = make()
    stages = [(2, "all", ("attention",)), ("100%", "none")]
    run = trainer(tmp_path, model, SharingCallback(lambda m: m.transformer.h, stages), save_steps=1, max_steps=4)
    assert len({layer.attn.c_attn.weight for layer in model.transformer.h}) == 1
    assert len({layer.mlp.c_fc.weight for layer in model.transformer.h}) == 4
    run.train()
    assert len({layer.attn.c_attn.weight for layer in model.transformer.h}) == 4
    for step in (1, 3):
        again = trainer(tmp_path / "again", make(seed=1), SharingCallback("transformer.h", stages), max_steps=4)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert equal(weights(again.model), weights(model))


def test_a_callback_that_is_added_later_shares_from_the_first_step(uninterrupted, tmp_path):
    kind, _, run, _ = uninterrupted
    late = trainer(tmp_path, make(kind), None, save_strategy="no")
    late.add_callback(SharingCallback(KINDS[kind], STAGES))
    late.train()
    assert equal(weights(late.model), weights(run.model))


def test_a_model_that_the_trainer_makes_shares_from_the_first_step(tmp_path):
    callback = SharingCallback("transformer.h", STAGES)
    made = trainer(tmp_path, None, callback, model_init=lambda: make(), save_strategy="no")
    by_hand = trainer(tmp_path, None, ByHand("gpt2"), model_init=lambda: made_and_shared("gpt2"), save_strategy="no")
    for run in (made, by_hand):
        run.train()
    assert equal(weights(made.model), weights(by_hand.model))


def test_after_training_experts_are_saved_as_transformers_names_them(uninterrupted, tmp_path):
    kind, folder, run, _ = uninterrupted
    run.save_model(str(tmp_path))
    safetensors = pytest.importorskip("safetensors.torch")
    saved, checkpoint = (
        safetensors.load_file(f"{place}/model.safetensors").keys() for place in (tmp_path, folder / "checkpoint-6")
    )
    assert (saved == checkpoint) == (kind != "mixtral")
    for place in (tmp_path, folder / "checkpoint-6"):
        assert equal(weights(type(run.model).from_pretrained(place)), weights(run.model))


def test_weights_under_names_that_the_trainer_does_not_read_back_are_refused(tmp_path):
    model = make("mixtral")
    plain = trainer(tmp_path, model, None, max_steps=1)
    plain.train()
    again = trainer(tmp_path, make("mixtral"), SharingCallback("model.layers", STAGES))
    with pytest.raises(TenfoldError, match=r"the checkpoint has model\.layers\.0\..*, and the model no such parameter"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_model_with_the_callback_is_copied_and_pickled(tmp_path):
    model = make()
    trainer(tmp_path, model, SharingCallback("transformer.h", STAGES))
    twin = copy.deepcopy(model)
    tenfold.delink(twin.transformer.h)
    assert len(set(model.transformer.h.parameters())) < len(set(twin.transformer.h.parameters()))
    torch.save(model, tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=False).load_state_dict(twin.state_dict())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages are missing"),
        ([("20%", "all"), ("90%", "none")], "the last stage ends at '90%'; it must end with the run"),
        ([("20%", "none"), ("100%", "all")], r"stages.1: .* does not refine"),
        ([("2 apples", "all"), ("100%", "none")], "cannot read '2 apples' as the end of a stage"),
        ([({"tokens": 5}, "all"), ("100%", "none")], "after steps, not at"),
        ([("20%", "most"), ("100%", "none")], "cannot read 'most'"),
    ],
)
def test_stages_that_cannot_be_are_refused(tmp_path, stages, message):
    with pytest.raises(TenfoldError, match=message):
        trainer(tmp_path, make(), SharingCallback("transformer.h", stages))


def test_a_wrong_name_of_the_layers_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(TenfoldError, match=r"no list of layers called 'model.layers'; its lists are transformer.h"):
        trainer(tmp_path, make(), SharingCallback("model.layers", STAGES))


def test_measure_needs_gradients_that_a_callback_does_not_take():
    with pytest.raises(TenfoldError, match="'measure' cannot be had in a callback"):
        SharingCallback("transformer.h", STAGES, moments="measure")
