"""OLMo-core: its Llama-like transformer with torch's SDPA, in a plain loop (its Trainer wants a data set on disk)."""

import contextlib

import torch
from common import (
    BETAS,
    CLIP,
    DECAY,
    JOB,
    LEARNING_RATE,
    RANK,
    SHAPE,
    VOCABULARY,
    WORLD,
    Clock,
    batch_of,
    check_parameters,
)
from olmo_core.config import DType
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig

shape = TransformerConfig.llama_like(
    d_model=SHAPE["hidden"],
    vocab_size=VOCABULARY,
    n_layers=SHAPE["layers"],
    n_heads=SHAPE["heads"],
    feed_forward=FeedForwardConfig(hidden_size=SHAPE["ffn"], bias=False, dtype=DType.float32),
    attn_backend=AttentionBackendName.torch,
)
model = shape.build(init_device="cpu")
model.init_weights(device=torch.device("cpu"))
check_parameters(model)
trained: torch.nn.Module = model
if WORLD > 1:
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=WORLD)
    trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY, fused=True)
half = torch.autocast("cpu", torch.bfloat16) if JOB["precision"] == "bf16" else contextlib.nullcontext()
clock, over = Clock(), False
while not over:
    clock.begin()
    data = batch_of(clock.steps)
    with half:
        logits = trained(data[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), data[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    over = clock.end(loss.item())
