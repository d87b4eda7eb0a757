"""Tenfold's own training step, with the memory settings that the `tenfold` command makes."""

import os

import torch
from common import BETAS, CLIP, DECAY, JOB, LEARNING_RATE, LENGTH, SHAPE, VOCABULARY, Clock, batch_of, check_parameters

from tenfold.config.model import ModelConfig
from tenfold.config.run import DataConfig, OptimConfig, RunConfig, TrainingConfig
from tenfold.hardware.memory import keep_freed_memory
from tenfold.planning.stages import plan_stages
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import build_model, check_compiler, compile_layers
from tenfold.training.step import train_step

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
keep_freed_memory()
device = torch.device("cpu")
config = RunConfig(
    model=ModelConfig(vocab_size=VOCABULARY, tie_embeddings=False, **SHAPE),
    data=DataConfig(sequence_length=LENGTH),
    training=TrainingConfig(
        steps=1000, batch_size=JOB["batch"], precision=JOB["precision"], compile=JOB["setting"] == "compiled"
    ),
    optim=OptimConfig(lr=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, clip=CLIP),
)
model = build_model(config, plan_stages(config)[0].sharing, device)
optimizers = build_optimizers(model, config.optim)
check_parameters(model)
if config.training.compile:
    check_compiler(device)
    compile_layers(model.layers)
clock, over = Clock(), False
while not over:
    clock.begin()
    result = train_step(model, optimizers, batch_of(clock.steps), clock.steps + 1, LEARNING_RATE, config)
    over = clock.end(result.loss)
