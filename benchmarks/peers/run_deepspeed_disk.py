"""DeepSpeed ZeRO-Infinity on the CPU: weights and optimizer state of a Hugging Face Llama model on disk, or nothing.

The shape is that of `benchmarks/offload.py`; layers recompute, as there. In an environment with DeepSpeed, libaio and
a compiler:

    python benchmarks/peers/run_deepspeed_disk.py '{"size": "90M", "batch": 4, "length": 256, "threads": 1, "steps": 3,
        "seconds": 600, "precision": "fp32", "setting": "disk", "folder": "/fast/dir"}'

`setting`: disk, or plain for the same model in the same engine without it. Tells every step, then the peak of the
resident set and what it was before the model.
"""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from common import JOB, tell
from engine import configuration, train
from llama import llama

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
deepspeed.init_distributed("gloo")
torch.ones(512, 512) @ torch.ones(512, 512)
before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
tell(before=before)

zero: dict[str, Any] = {"stage": 0}
if JOB["setting"] == "disk":
    place = {"device": "nvme", "nvme_path": JOB["folder"], "pin_memory": False}
    zero = {
        "stage": 3,
        "sub_group_size": 8_000_000,
        "stage3_max_live_parameters": 16_000_000,
        "stage3_prefetch_bucket_size": 8_000_000,
        "offload_param": {**place, "buffer_count": 10, "buffer_size": 8_000_000},
        "offload_optimizer": {**place, "buffer_count": 4},
    }
config = configuration(zero)
with deepspeed.zero.Init(config_dict_or_path=config, enabled=JOB["setting"] == "disk"):
    model = llama()
model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
Path("/proc/self/clear_refs").write_text("5")
train(engine)
