"""litgpt: its GPT model and the loop of its `litgpt pretrain`: Fabric, chunked cross-entropy, clipping, fused AdamW."""

import lightning
import torch
from common import (
    BETAS,
    CLIP,
    DECAY,
    JOB,
    LEARNING_RATE,
    LENGTH,
    SHAPE,
    VOCABULARY,
    WORLD,
    Clock,
    batch_of,
    check_parameters,
)
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

fabric = lightning.Fabric(
    accelerator="cpu",
    devices=WORLD,
    strategy="ddp" if WORLD > 1 else "auto",
    precision={"fp32": "32-true", "bf16": "bf16-true" if JOB["setting"] == "pure" else "bf16-mixed"}[JOB["precision"]],
)
fabric.launch()
with fabric.init_module():
    model = GPT(
        Config(
            block_size=LENGTH,
            padded_vocab_size=VOCABULARY,
            n_layer=SHAPE["layers"],
            n_head=SHAPE["heads"],
            n_embd=SHAPE["hidden"],
            intermediate_size=SHAPE["ffn"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
check_parameters(model)
model = fabric.setup(torch.compile(model) if JOB["setting"] == "compiled" else model)
optimizer = fabric.setup_optimizers(
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY, fused=True)
)
clock, over = Clock(), False
while not over:
    clock.begin()
    data = batch_of(clock.steps)
    loss = chunked_cross_entropy(model(data[:, :-1].contiguous()), data[:, 1:].contiguous())
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=CLIP)
    optimizer.step()
    optimizer.zero_grad()
    over = clock.end(loss.item())
