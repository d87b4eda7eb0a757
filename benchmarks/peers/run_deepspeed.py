"""DeepSpeed ZeRO on the CPU: the Hugging Face Llama model in its engine, with the optimizer offloaded or not."""

import deepspeed
from common import JOB
from engine import configuration, train
from llama import llama

deepspeed.init_distributed("gloo")
model = llama()
zero = {"stage": 2}
if JOB["setting"] == "offload":
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(zero))
train(engine)
