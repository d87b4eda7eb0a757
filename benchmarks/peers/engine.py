"""DeepSpeed's engine around Hugging Face's Llama model: how it is configured, and its loop."""

from typing import Any

from common import BETAS, CLIP, DECAY, JOB, LEARNING_RATE, ROWS, Clock, batch_of


def configuration(zero: dict[str, Any]) -> dict[str, Any]:
    """For a job, with its settings of ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": JOB["precision"] == "bf16"},
        "zero_optimization": zero,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": DECAY}},
    }


def train(engine: Any) -> None:
    """Steps, until the clock says so."""
    clock, over = Clock(), False
    while not over:
        clock.begin()
        tokens = batch_of(clock.steps)[:, :-1]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        over = clock.end(loss.item())
