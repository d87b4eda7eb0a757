"""The plots of one run, each a function from its history to a figure (None where there is nothing to plot)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from tenfold.reporting.axes import (
    AXES,
    LINE_COLOURS,
    Plot,
    lines_plot,
    mark_stages,
    new_figure,
    show_rate,
    stage_colour,
)
from tenfold.reporting.decisions import correlation_plot, returns_plot
from tenfold.reporting.format import format_bytes, format_count, format_joules, format_share
from tenfold.reporting.heatmaps import busiest_expert, each_expert, similarity_maps
from tenfold.reporting.history import Event, History
from tenfold.reporting.lying import bytes_moved_plot, state_plot, waiting_plot
from tenfold.reporting.svg import COLOURS, smooth, thin

_MOST_EVALUATIONS = 12  # panels


def loss_plot(history: History, axis: str) -> Figure | None:
    """Training and validation loss against tokens, seconds or joules, with stages, delinkings and n-gram baselines."""
    x, y = history.series("loss", axis)
    held_x, held_y = history.series("validation_loss", axis, validation=True)
    if not x and not held_x:
        return None
    figure, axes = new_figure()
    if len(x) > 60:
        axes.plot(*thin(x, y), color=COLOURS["training"], alpha=0.3, linewidth=0.8)
        axes.plot(*thin(x, smooth(y, len(y) // 60)), color=COLOURS["training"], label="training, smoothed")
    elif x:
        axes.plot(x, y, color=COLOURS["training"], label="training")
    if held_x:
        held_x, held_y = thin(held_x, held_y)
        marker = "o" if len(held_x) <= 60 else ""
        axes.plot(held_x, held_y, color=COLOURS["validation"], marker=marker, markersize=3.5, label="validation")
    for name in ("unigram", "bigram"):
        level = (history.end or {}).get(f"{name}_loss")
        if level is not None:
            axes.axhline(level, color=COLOURS["baseline"], linestyle=(0, (5, 3)), linewidth=1)
            where: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 9, "color": COLOURS["baseline"]}
            axes.text(0.5, level, name, transform=axes.get_yaxis_transform(), **where)
    axes.set_ylabel("loss, nats per token")
    mark_stages(axes, history, axis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.97))
    return figure


def line_plot(
    history: History, keys: dict[str, str], label: str, show: Callable[[float], str] | None = None
) -> Figure | None:
    """One or more quantities of the steps against tokens; `keys` maps each to its name in the legend."""
    lines = [(history.series(key, "tokens"), name) for key, name in keys.items()]
    return lines_plot(history, lines, label, show)


def accuracy_plot(history: History) -> Figure | None:
    """The share of masked tokens that an encoder finds, at each validation."""
    series = history.series("masked_accuracy", "tokens", validation=True)
    return lines_plot(history, [(series, "found")], "share found", format_share)


def mixture_plot(history: History) -> Figure | None:
    """The share of each source of the data mixture."""
    return lines_plot(history, _by_source(history.steps, "mixture"), "share of tokens", format_share)


def source_losses_plot(history: History) -> Figure | None:
    """The held-out loss of each source of the data mixture."""
    return lines_plot(history, _by_source(history.validations, "source_losses"), "loss, nats per token", None)


def _by_source(events: list[Event], key: str) -> list[tuple[tuple[list[float], list[float]], str]]:
    """For each source named in `key` of the events its values against tokens."""
    told = [event for event in events if event.get(key) and event.get("tokens") is not None]
    names = list(dict.fromkeys(name for event in told for name in event[key]))
    return [
        (([e["tokens"] for e in told], [math.nan if e[key].get(n) is None else e[key][n] for e in told]), n[-24:])
        for n in names[: len(LINE_COLOURS)]
    ]


def drift_plot(history: History) -> Figure | None:
    """How alike the layers stay that shared before the first delinking: mean, and from the least to the most alike."""
    if len(history.similarities) < 2:
        return None
    figure, axes = new_figure()
    names = {"attention": "attention", "ffn": "feed-forward"}
    for (kind, name), colour in zip(names.items(), ("training", "validation"), strict=True):
        told = [(event["tokens"], values) for event, values in history.similarity(kind) if "tokens" in event]
        x = [tokens for tokens, _ in told]
        axes.plot(
            x,
            [sum(values) / len(values) for _, values in told],
            color=COLOURS[colour],
            label=name,
            marker="o" if len(x) <= 60 else "",
            markersize=3,
        )
        lowest, highest = [min(values) for _, values in told], [max(values) for _, values in told]
        axes.fill_between(x, lowest, highest, color=COLOURS[colour], alpha=0.15, linewidth=0)
    axes.set_ylabel("cosine between layers")
    axes.set_ylim(top=1 + 0.04 * (1 - axes.get_ylim()[0]))
    mark_stages(axes, history, "tokens")
    axes.legend(loc="lower left")
    return figure


def evaluation_plots(history: History) -> list[Plot]:
    """For each value of each task a plot with a line for each name; the first dozen."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for event in history.evaluations:
        for key, value in (event.get("values") or {}).items():
            if isinstance(value, int | float) and event.get("tokens") is not None:
                lines = found.setdefault((str(event.get("task", "")), key), {})
                lines.setdefault(str(event.get("name", "")), []).append((event["tokens"], float(value)))
    plots = []
    for number, ((task, key), lines) in enumerate(list(found.items())[:_MOST_EVALUATIONS]):
        series = [(([x for x, _ in points], [y for _, y in points]), name[-32:]) for name, points in lines.items()]
        label = key.replace("_", " ")
        show = format_share if key == "accuracy" else None
        draw = functools.partial(lines_plot, history, series, label, show)
        names = ", ".join(list(lines)[:4])
        plots.append(Plot.single(f"evaluation-{number}", f"{task}: {label}", f"Evaluated on {names}.", draw))
    return plots


def stored_plot(history: History) -> Figure | None:
    """Stored parameters of each stage, in front of the parameters that the full model counts."""
    rows = [row for row in history.stage_rows() if row.get("stored_parameters")]
    if not rows:
        return None
    figure, axes = new_figure((5.2, max(2.6, 0.4 + 0.5 * len(rows))))
    names = [row["name"] for row in rows]
    stored = [row["stored_parameters"] for row in rows]
    totals = [row.get("total_parameters") or count for row, count in zip(rows, stored, strict=True)]
    axes.barh(names, totals, color=COLOURS["ghost"], height=0.5)
    axes.barh(names, stored, color=[stage_colour(history, name) for name in names], height=0.5)
    for row, (count, total) in enumerate(zip(stored, totals, strict=True)):
        text = format_count(count) if count == total else f"{format_count(count)} of {format_count(total)}"
        axes.annotate(text, (total, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(totals) * 1.35)
    margin = 0.5 + max(0, 2 - len(rows)) / 2
    axes.set_ylim(len(rows) - 1 + margin, -margin)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    return figure


def all_plots(history: History) -> list[tuple[str, list[Plot]]]:
    """The panels of a run's report by section: (heading, panels)."""
    of = functools.partial
    line = functools.partial(functools.partial, line_plot, history)
    single = Plot.single
    course = [
        Plot(
            "loss",
            "Loss",
            "Cross-entropy. Shaded: the stages; dashed upright: a delinking; dashed level: n-gram models.",
            [(AXES[axis], of(loss_plot, history, axis)) for axis in AXES],
        ),
        single("accuracy", "Masked tokens", "Share that is found, on held-out text.", of(accuracy_plot, history)),
        single(
            "stored",
            "Stored parameters",
            "Each shared block counts once; pale: the parameters of the whole model.",
            of(stored_plot, history),
        ),
        Plot(
            "throughput",
            "Throughput",
            "At each logged step: tokens a second, and the share of the matrix rate that was measured at the start.",
            [
                ("tokens/s", line({"tokens_per_second": "tokens/s"}, "tokens/s", format_count)),
                ("of rate", line({"flops_share": "share"}, "share of matrix rate", format_share)),
            ],
        ),
        single(
            "memory",
            "Memory",
            "In use at each logged step: this process on a CPU, tensors at their most on an accelerator.",
            line({"memory_bytes": "memory"}, "memory", format_bytes),
        ),
        single(
            "gradient-norm",
            "Gradient norm",
            "Global norm before clipping.",
            line({"grad_norm": "gradient norm"}, "gradient norm"),
        ),
        single(
            "learning-rate",
            "Learning rate",
            "As the optimizer used it.",
            line({"lr": "learning rate"}, "learning rate", show_rate),
        ),
        Plot(
            "energy",
            "Energy",
            "Joules so far, and for each token since the line before; how they were counted is said above.",
            [
                ("so far", line({"joules": "energy"}, "energy", format_joules)),
                ("a token", line({"joules_per_token": "energy"}, "energy a token", format_joules)),
            ],
        ),
        single(
            "sequence-length",
            "Sequence length",
            "Tokens in one training sequence.",
            line({"sequence_length": "tokens"}, "tokens", format_count),
        ),
        single("mixture", "Mixture", "Share of each source in the training data.", of(mixture_plot, history)),
        single("source-losses", "Each source", "Loss on held-out text of its own.", of(source_losses_plot, history)),
    ]
    experts = [
        single(
            "experts",
            "Each expert's load over time",
            "For each layer: load over the mean of the layer, 1 is even. White: a delinking.",
            of(each_expert, history),
        ),
        single(
            "busiest-expert",
            "The busiest expert over time",
            "For each layer: the load of its busiest expert over the mean; 1 is even.",
            of(busiest_expert, history),
        ),
        single(
            "router-losses",
            "Router losses",
            "What keeps the router even and its scores small.",
            line({"balance_loss": "load balance", "z_loss": "router z"}, "auxiliary loss"),
        ),
        single(
            "dropped",
            "Dropped tokens",
            "Share of routed tokens that found their expert full.",
            line({"dropped_share": "dropped"}, "share dropped", format_share),
        ),
    ]
    layers = [
        single(
            "correlation",
            "Gradients of layers that share",
            "Correlation between those of neighbouring layers, by which a stage ends. Dotted upright: a split.",
            of(correlation_plot, history),
        ),
        single(
            "returns",
            "Returns",
            "How fast the loss falls, and is predicted to fall once delinked; the stage ends when that is faster.",
            of(returns_plot, history),
        ),
        single(
            "drift",
            "How freed layers drift apart",
            "Cosine between the weights of layers that once shared: mean, and shaded from the least to the most alike.",
            of(drift_plot, history),
        ),
        single(
            "similarity",
            "Similarity between layers",
            "Cosine between the weights of each two layers: 1 where they share, and still just after a delinking.",
            of(similarity_maps, history),
        ),
    ]
    state = [
        single(
            "state",
            "State by tier",
            "What each stage has on the device and below it. Activations: those that stay, and temporaries. Working "
            "memory: what is below comes up through it.",
            of(state_plot, history),
        ),
        single(
            "waiting",
            "Waiting for transfers",
            "Seconds of a step in which nothing was computed because state was on its way, by its kind.",
            of(waiting_plot, history),
        ),
        single(
            "moved",
            "Bytes moved",
            "In a step, from and to each tier below the device.",
            of(bytes_moved_plot, history),
        ),
    ]
    return [
        ("Course of training", course),
        ("Where state lies", state),
        ("Similarity between layers", layers),
        ("Experts", experts),
        ("Evaluations", evaluation_plots(history)),
    ]
