"""The last word of a passage from the words before it: the LAMBADA task (Paperno et al., arXiv 1606.06031)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tenfold.evaluation.inference import inference
from tenfold.evaluation.loss import batches, perplexity
from tenfold.nn.decoder import Decoder

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


@dataclass(frozen=True)
class Passage:
    """Token ids of what is given and of the last word that is asked for; neither is empty."""

    given: list[int]
    word: list[int]


def cut_passages(text: str, kind: str) -> Iterator[str]:
    """The passages of one text: the "documents" itself, its "lines", its "paragraphs" (between blank lines), or, for
    "auto", paragraphs if it has a blank line and lines if not."""
    text = text.strip()
    if kind == "auto":
        kind = "paragraphs" if _BLANK_LINE.search(text) else "lines"
    if kind == "documents":
        yield text
    else:
        yield from text.splitlines() if kind == "lines" else _BLANK_LINE.split(text)


def read_passages(texts: Iterable[str], tokenizer: Tokenizer, end_of_text: int, min_words: int) -> Iterator[Passage]:
    """Each text cut before its last word, what is given after an end-of-text token; texts of fewer than `min_words`
    words (at least 2) are left out.

    Words are what whitespace separates. The text is tokenized whole: the word is the tokens that reach beyond the
    blank before it, as a tokenizer that joins blanks to words would have it, and any other too.
    """
    for batch in batches((text.rstrip() for text in texts), 256):
        long_enough = [text for text in batch if len(text.split(None, max(min_words, 2) - 1)) >= max(min_words, 2)]
        for text, encoding in zip(
            long_enough, tokenizer.encode_batch(long_enough, add_special_tokens=False), strict=True
        ):
            boundary = len(text.rsplit(None, 1)[0])
            ends = [end for _, end in encoding.offsets]
            first = next(place for place, end in enumerate(ends) if end > boundary)
            if first:
                yield Passage([end_of_text, *encoding.ids[:first]], encoding.ids[first:])


def cloze(
    model: Decoder,
    passages: Sequence[Passage],
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda passages: None,
    window: int | None = None,
) -> dict[str, float | int]:
    """Accuracy: the share of passages all of whose word's tokens are the likeliest, one after the other.
    Perplexity: exp of the mean over passages of -log p(word), `loss` (nats per word).

    Of what is given the model sees the last tokens that `window` (None: all its positions) has room for; a word longer
    than that is `too_long` and counts for nothing. Passages are batched by length and padded behind their end.
    """
    window = window or model.max_positions
    fitting = [passage for passage in passages if len(passage.word) <= window]
    if not fitting:
        raise ValueError("no passage's last word fits the window")
    order = sorted(range(len(fitting)), key=lambda number: len(fitting[number].given) + len(fitting[number].word))
    device = model.device
    losses, right, cut = [0.0] * len(fitting), 0, 0
    for batch in batches(reversed(order), batch_size):  # the longest first: memory that suffices does so at once
        rows = [(fitting[number].given + fitting[number].word)[:-1] for number in batch]
        cut += sum(len(row) > window for row in rows)
        rows = [row[-window:] for row in rows]
        longest = max(map(len, rows))
        inputs_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        words = [fitting[number].word for number in batch]
        of_N = [number for number, word in enumerate(words) for _ in word]
        place_N = [len(row) - len(word) + n for row, word in zip(rows, words, strict=True) for n in range(len(word))]
        target_N = torch.tensor([token for word in words for token in word], device=device)
        with inference(model):
            logits_NV = model.logits(model(inputs_BT)[0][of_N, place_N])
            loss_N = torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="none").tolist()
            hit_N = (logits_NV.argmax(-1) == target_N).tolist()
        missed = set()
        for row, loss, hit in zip(of_N, loss_N, hit_N, strict=True):
            losses[batch[row]] += loss
            if not hit:
                missed.add(row)
        right += len(batch) - len(missed)
        advance(len(batch))
    loss = math.fsum(losses) / len(fitting)
    return {
        "accuracy": right / len(fitting),
        "perplexity": perplexity(loss),
        "loss": loss,
        "passages": len(fitting),
        "cut": cut,
        "too_long": len(passages) - len(fitting),
    }
