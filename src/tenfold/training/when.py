"""`until = "auto"`: when a stage ends, or a group of its layers is split, by what is measured while it runs.

Correlation (SWE, arXiv 2110.03848): every so many steps the gradients of neighbouring layers that share are compared.
The stage ends when more than half of the pairs were under the threshold in a row of checks; with `split` each pair by
itself is split then, and the stage ends with the last.

Returns: the stage ends when the loss falls slower, a second, than the next stage is predicted to make it fall:

    now:        d = fall of the loss a step, by a line through the last half of the stage's steps,  over t
    predicted:  d x gain (`LayerGradients.gain`),                                                   over t'
    t' = forward and backward with the next stage's gradients + (t - the same with this one's) x stored' / stored

so when gain > t' / t, or when the loss falls no more. t is measured over the steps before the first check; what a step
does beside forward and backward (optimizer, norm, clipping) is taken to grow with the stored parameters. Times are
measured once in a stage and kept, so that a resumption decides as the run would have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import backward
from tenfold.planning.stages import Stage, watched_pairs
from tenfold.sharing.correlation import LayerGradients, aliases, drop_gradients
from tenfold.training.measuring import Coming
from tenfold.training.setup import shape_of
from tenfold.training.step import micro_batches_of

Pair = tuple[int, int]
_TIMED_PASSES = 3


@dataclass(frozen=True)
class Decision:
    """What a check came to; `numbers` go into its event."""

    numbers: dict[str, Any]
    ends: bool = False
    cuts: list[Pair] = field(default_factory=list)


class Watch:
    """The rule of one stage. `state` is all it remembers, plain numbers that go into checkpoints."""

    def __init__(self, stage: Stage, following: Stage, state: dict[str, Any]) -> None:
        assert stage.rule is not None
        self.stage, self.following, self.rule, self.state = stage, following, stage.rule, state

    def saw(self, step: int, loss: float, seconds: float) -> None:
        """Take in a step that was done: `step` counts it."""
        x = step - self.stage.first_step
        window = self.state.setdefault("window", [0, 0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((1, x, loss, x * x, x * loss)):
            window[place] += value
        if x > 1:  # the first step of a stage makes what the others find made
            spent = self.state.setdefault("spent", [0, 0.0])
            spent[0], spent[1] = spent[0] + 1, spent[1] + seconds

    def due(self, step: int) -> bool:
        """Whether a check comes after `step` steps of the run; none comes where the stage ends anyway."""
        return step < self.stage.last_step and (step - self.stage.first_step) % int(self.rule["every"]) == 0

    def check(self, model: Decoder, coming: Coming, config: RunConfig) -> Decision:
        """Look at the gradients on the batch of the coming step, which training sees as usual, and decide.

        Costs one forward and backward pass over it, and nothing that lasts: weights and gradients are as before.
        """
        pairs = watched_pairs(self.stage, self.following)
        parts, valid_tokens = micro_batches_of(coming.batch, config, coming.first_sample, coming.pieces)
        if len(parts) == 1 and len(parts[0].inputs) > 1:
            parts = list(parts[0].split(-(-len(parts[0].inputs) // 2)))
        with LayerGradients(model.layers, list(model.parameters()), self.following.sharing) as gradients:
            for number, part in enumerate(parts):
                gradients.half = number % 2
                backward(model, part, valid_tokens, config.training.loss_chunk)
        correlations = gradients.correlations(pairs)
        numbers = {"rule": self.rule["auto"], "pairs": [list(pair) for pair in pairs], "correlations": correlations}
        if self.rule["auto"] == "correlation":
            decision = self.by_correlation(pairs, correlations)
        else:
            if "timed" not in self.state:
                count, seconds = self.state.get("spent", [0, 0.0])
                self.state["timed"] = step_times(
                    model, self.following, coming, config, seconds / count if count else math.nan
                )
            first_half = sum(len(part.inputs) for part in parts[::2]) / sum(len(part.inputs) for part in parts)
            decision = self.by_returns(gradients.gain(first_half, config.optim.divide_shared))
        return Decision(numbers | decision.numbers, decision.ends, decision.cuts)

    def by_correlation(self, pairs: Sequence[Pair], correlations: Sequence[float]) -> Decision:
        """The rule of the correlation, on this check's numbers."""
        threshold, checks = self.rule["threshold"], self.rule["checks"]
        under = [pair for pair, value in zip(pairs, correlations, strict=True) if value < threshold]
        numbers = {"threshold": threshold, "under": len(under), "checks": checks}
        if not self.rule["split"]:
            self.state["row"] = self.state.get("row", 0) + 1 if 2 * len(under) > len(pairs) else 0
            return self._decided(numbers | {"in_a_row": self.state["row"]}, self.state["row"] >= checks)
        before = self.state.get("rows", {})
        rows = {f"{one}-{other}": before.get(f"{one}-{other}", 0) + 1 for one, other in under}
        cuts = [(one, other) for one, other in under if rows[f"{one}-{other}"] >= checks]
        self.state["rows"] = rows
        numbers |= {"in_a_row": max(rows.values(), default=0)}
        return self._decided(numbers, len(cuts) == len(pairs), cuts)

    def by_returns(self, gain: float) -> Decision:
        """The rule of returns, on the predicted gain a step, the losses so far and the times measured."""
        windows = [*self.state.get("windows", []), self.state.pop("window")]
        self.state["windows"] = windows
        fall, times = _fall(windows[len(windows) // 2 :]), self.state["timed"]
        step, free = times["step_seconds"], times["next_step_seconds"]
        now = math.nan if fall is None else max(fall, 0.0) / step
        then = math.nan if fall is None else max(fall, 0.0) * gain / free
        better = fall is not None and (fall <= 0 or then > now)
        self.state["row"] = self.state.get("row", 0) + 1 if better else 0
        numbers = {
            "gain": gain,
            "loss_fall": None if fall is None else fall / self.stage.tokens_per_step,  # nats a token
            "loss_per_second": now,
            "next_loss_per_second": then,
            **times,
            "checks": self.rule["checks"],
            "in_a_row": self.state["row"],
        }
        return self._decided(numbers, self.state["row"] >= self.rule["checks"])

    def _decided(self, numbers: dict[str, Any], ends: bool, cuts: Sequence[Pair] = ()) -> Decision:
        if ends:
            return Decision(numbers | {"decision": "end"}, True)
        decision = {"decision": "split", "cut": [list(pair) for pair in cuts]} if cuts else {"decision": None}
        return Decision(numbers | decision, False, list(cuts))


def _fall(windows: Sequence[Sequence[float]]) -> float | None:
    """How much the loss falls a step, by least squares over windows of sums (count, x, loss, x^2, x loss)."""
    n, x, y, xx, xy = (math.fsum(column) for column in zip(*windows, strict=True))
    spread = n * xx - x * x
    return None if n < 3 or spread <= 0 else -(n * xy - x * y) / spread


def step_times(
    model: Decoder, following: Stage, coming: Coming, config: RunConfig, step_seconds: float
) -> dict[str, float]:
    """How long a step takes, `step_seconds` as measured, and how long one of the next stage is expected to.

    Times forward and backward of a micro-batch with the gradients of both patterns; the best of three. NaN
    `step_seconds` (nothing measured yet) stand for no more than forward and backward.
    """
    parts, valid_tokens = micro_batches_of(coming.batch, config, coming.first_sample, coming.pieces)

    def best() -> float:
        hooks, found = drop_gradients(model.parameters()), math.inf
        for number in range(_TIMED_PASSES + 1):  # one to get ready
            _wait(coming.batch.device)
            began = time.monotonic()
            backward(model, parts[0], valid_tokens, config.training.loss_chunk)
            _wait(coming.batch.device)
            found = min(found, time.monotonic() - began) if number else found
        for hook in hooks:
            hook.remove()
        return found * len(parts)

    now = best()
    with aliases(model.layers, following.sharing, lambda _name, kind: kind.after):
        after = best()
    stored, stored_after = (
        sum(parameter.numel() for parameter in module.parameters())
        for module in (model, shape_of(config, following.sharing))
    )
    step = now if math.isnan(step_seconds) else step_seconds
    return {
        "step_seconds": step,
        "next_step_seconds": after + max(step - now, 0.0) * stored_after / stored,
        "pass_seconds": now,
        "next_pass_seconds": after,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
