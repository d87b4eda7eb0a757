"""How a model is asked, as against trained."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from tenfold.nn.decoder import Decoder


@contextlib.contextmanager
def inference(model: Decoder) -> Iterator[None]:
    """While open: no gradients, no dropped tokens (`moe.capacity` limits training alone), nothing compiled.

    So a model in training, compiled or not, gives the same numbers as its checkpoint does later.
    """
    training = model.training
    if training:
        model.eval()
    # Setting the stance imports the compiler, which takes seconds; what it has not been imported for is not compiled.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        if training:
            model.train()
