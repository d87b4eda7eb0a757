"""What a run looks at besides its loss: evaluations, likeness of layers, text that it writes, logits at a delinking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tenfold.config.run import EvaluationConfig, RunConfig
from tenfold.data.mixture import TrainingData
from tenfold.data.progress import Progress
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.generation import generate
from tenfold.evaluation.inference import inference
from tenfold.evaluation.sets import EvaluationSet, TextTokenizer, read_set
from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import held_inside, matrices_inside
from tenfold.parallel.layout import Layout
from tenfold.parallel.pieces import local_of
from tenfold.sharing.similarity import layer_similarity, seen_layers

SAMPLE_TOKENS = 120


def read_evaluations(config: RunConfig, data: TrainingData) -> list[tuple[EvaluationConfig, EvaluationSet]]:
    """The texts that the run file asks about, read; what is wrong with them is told before the first step."""
    if data.tokenizer_file is None:
        raise TenfoldError(
            "evaluations need the tokenizer that the training data was made with, and it is not known: name it as "
            "data.tokenizer"
        )
    tokenizer = TextTokenizer.of(data.tokenizer_file)
    recipes, window = Path(config.data.cache) / "recipes", config.data.sequence_length
    found = [
        (asked, read_set(asked.data, asked, tokenizer, window, recipes, Progress(True))) for asked in config.evaluations
    ]
    if config.model.objective == "masked":
        for _, subject in found:
            subject.sequences()  # too little text is told before the first step
    return found


def similarity(model: Decoder, layout: Layout) -> dict[str, Any] | None:
    """How alike the layers are, as a `similarity` event tells it; None for one layer, and where no rank can see two
    layers: in stages of a pipeline, and where ranks have parts of low-rank differences."""
    layers = model.layers
    if layout.degrees.pipeline > 1 or (not layout.alone and layout.sharing.rank):
        return None
    layout.let_go(model)
    seen = seen_layers(len(layers))
    if len(seen) < 2:
        return None
    copies = layout.copies(model)

    def own(module: nn.Module) -> Iterator[Tensor]:
        for weight in held_inside(module):
            yield local_of(weight.detach()) * copies[weight] ** -0.5

    weights = matrices_inside if layout.alone else own
    kinds = {
        part: layer_similarity(
            [layers[layer].get_submodule(part) for layer in seen], weights, lambda products: layout.total(products)[0]
        )
        for part in ("attention", "ffn")
    }
    return {"layers": seen, **kinds}


def write_sample(model: Decoder, data: TrainingData, source: PackedSequences, seed: int) -> str | None:
    """What the model writes of its own, from the beginning of a held-out document.

    Nothing from an encoder, and nothing that can be read without a tokenizer.
    """
    if model.config.objective == "masked" or data.tokenizer_file is None:
        return None
    begin = [] if data.end_of_text is None else [data.end_of_text]
    prompt = [*begin, *source.split.read(0, min(16, source.split.tokens)).tolist()]
    with torch.compiler.set_stance("force_eager"):  # a text has many lengths, and none is worth compiling for
        written = list(generate(model, prompt, SAMPLE_TOKENS, seed=seed))
    return data.tokenizer().decode([*prompt[len(begin) :], *written])


@torch.no_grad()
def logits_of(model: Decoder, tokens_BT: Tensor) -> Tensor:
    """The logits as training computes them, [B, T, vocabulary]."""
    hidden, _ = model(tokens_BT)
    return model.logits(hidden)


def logits_in_fp32(model: Decoder, tokens_BT: Tensor) -> Tensor:
    """The logits in fp32 and with no token dropped, whatever training does."""
    dtype, model.dtype = model.dtype, torch.float32
    try:
        with inference(model):
            return logits_of(model, tokens_BT)
    finally:
        model.dtype = dtype
