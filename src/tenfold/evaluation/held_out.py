"""The held-out text of a run, source by source and over the mixture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tenfold.config.run import DataConfig, TrainingConfig
from tenfold.data.mixing import MixedSequences
from tenfold.data.sampling import PackedSequences
from tenfold.evaluation.loss import held_out_loss
from tenfold.evaluation.masked import masked_loss, masked_unigram_loss
from tenfold.evaluation.ngram import ngram_losses
from tenfold.nn.decoder import Decoder


class HeldOut:
    """Validation sequences by source. What is told of all of them is weighted as `data.mixture`, whatever the stages
    say, so that losses of different stages compare; from every source the same number of sequences is read."""

    def __init__(self, sources: Mapping[str, PackedSequences], data: DataConfig, training: TrainingConfig) -> None:
        self.sources = dict(sources)
        self._limit, self._chunk = training.validation_sequences, training.loss_chunk
        told = {source.name: source.weight for source in data.mixture} or dict.fromkeys(self.sources, 1.0)
        weights = {name: told[name] for name in self.sources}
        total = sum(weights.values())
        # Where only sources that come in later hold text out, they count alike.
        self.weights = {name: weight / total if total else 1 / len(weights) for name, weight in weights.items()}

    @property
    def first(self) -> PackedSequences:
        """The sequences of one source."""
        return next(iter(self.sources.values()))

    def evaluate(self, model: Decoder, batch_size: int) -> dict[str, Any]:
        """What a `validation` event says: losses, bits per byte (a decoder), the share guessed right (an encoder)."""
        losses, accuracies = {}, {}
        for name, sequences in self.sources.items():
            held_out = (model, sequences, self._limit, batch_size, self._chunk)
            if model.config.objective == "masked":
                losses[name], accuracies[name] = masked_loss(*held_out)
            else:
                losses[name] = held_out_loss(*held_out)
        event: dict[str, Any] = {"validation_loss": self._mean(losses)}
        if accuracies:  # and its loss is no code length of the text: no bits per byte
            event["masked_accuracy"] = self._mean(accuracies)
        else:
            event["bits_per_byte"] = self._bits_per_byte(losses)
        if len(losses) > 1:
            event["source_losses"] = losses
        return event

    def baselines(self, model: Decoder, train: MixedSequences, samples: int) -> dict[str, Any]:
        """The closing losses of models that only count, on the same held-out tokens, weighted alike."""
        if model.config.objective == "masked":
            found = {
                name: masked_unigram_loss(train, samples, sequences, self._limit, model.config)
                for name, sequences in self.sources.items()
            }
            (_, counted) = next(iter(found.values()))
            return {
                "unigram_loss": self._mean({name: loss for name, (loss, _) in found.items()}),
                "counted_tokens": counted,
            }
        losses = {
            name: ngram_losses(train, samples, sequences, self._limit, model.vocab_size)
            for name, sequences in self.sources.items()
        }
        return {
            "unigram_loss": self._mean({name: each.unigram for name, each in losses.items()}),
            "bigram_loss": self._mean({name: each.bigram for name, each in losses.items()}),
            "counted_tokens": next(iter(losses.values())).counted_tokens,
        }

    def _mean(self, values: Mapping[str, float]) -> float:
        return sum(self.weights[name] * value for name, value in values.items())

    def _bits_per_byte(self, losses: Mapping[str, float]) -> float | None:
        """Bits of the mixture's tokens over the bytes of text that they stand for; None where these are not known."""
        splits = {name: part.split for name, part in self.sources.items()}
        bytes_a_token = {
            name: split.text_bytes / split.tokens for name, split in splits.items() if split.text_bytes is not None
        }
        if len(bytes_a_token) < len(splits):
            return None
        return self._mean(losses) / math.log(2) / self._mean(bytes_a_token)
