"""DeepSpeed ZeRO on the CPU: the Hugging Face Llama model in its engine, with the optimizer offloaded or not."""

import deepspeed
from common import (
    BETAS,
    CLIP,
    DECAY,
    JOB,
    LEARNING_RATE,
    ROWS,
    Clock,
    batch_of,
)
from llama import llama

deepspeed.init_distributed("gloo")
model = llama()
zero = {"stage": 2}
if JOB["setting"] == "offload":
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": JOB["precision"] == "bf16"},
        "zero_optimization": zero,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": DECAY}},
    },
)
clock, over = Clock(), False
while not over:
    clock.begin()
    tokens = batch_of(clock.steps)[:, :-1]
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    over = clock.end(loss.item())
