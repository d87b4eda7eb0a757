"""Hugging Face: its Llama model from a configuration, in its Trainer."""

import tempfile
from typing import Any

import torch
from common import (
    BETAS,
    CLIP,
    DECAY,
    JOB,
    LEARNING_RATE,
    LENGTH,
    ROWS,
    VOCABULARY,
    WORLD,
    Clock,
)
from llama import llama
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

model = llama()


class Rows(torch.utils.data.Dataset):
    """Random rows, drawn one by one as the Trainer asks for them; labels are shifted by the model itself."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Timing(TrainerCallback):
    """Begins and ends the clock around each step of the Trainer, its data loading included."""

    clock = Clock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self.clock.end()
        self.clock.begin()


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        bf16=JOB["precision"] == "bf16",
        per_device_train_batch_size=ROWS,
        max_steps=1000,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo" if WORLD > 1 else None,
    )
    Trainer(model, arguments, default_data_collator, Rows(), callbacks=[Timing()]).train()
