"""The timeline of a step, as a page and as a trace: both are parsed, and held against the step."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from planning.doubles import roofline
from planning.test_work import MODELS, candidate_of, run_of
from tenfold.config.load import build
from tenfold.config.offload import PlacementRule
from tenfold.config.run import RunConfig
from tenfold.offload.placement import explicit
from tenfold.planning.memory import memory_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.step import StepForecast, play_step
from tenfold.reporting.timeline import timeline_page, trace_json


def step_of(model: str, parallel: dict[str, Any], ranks: int, below: bool = False) -> StepForecast:
    config = build(RunConfig, run_of(MODELS[model], {}, parallel, micro=2), "run.toml")
    (stage,) = plan_stages(config)
    candidate, cluster = candidate_of(config, ranks), roofline()
    if not below:
        return play_step(config, stage, candidate, cluster)  # type: ignore[arg-type]
    memory = memory_of(config, stage, candidate)
    rule = PlacementRule(layers="all", weights="host", moments="disk")
    placements = [explicit([rule], each.parts, config.model.layers) for each in memory]
    return play_step(config, stage, candidate, cluster, memory, placements)  # type: ignore[arg-type]


STEPS = {
    "one rank, offloaded": step_of("dense", {}, 1, below=True),
    "pipeline": step_of("dense", {"pipeline": 2}, 2),
    "experts": step_of("mixture", {"data_shard": 2, "expert": 2}, 2),
}


class Well(HTMLParser):
    """Every element is closed in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", STEPS)
def test_a_box_stands_in_its_lane_at_its_time(name: str) -> None:
    step = STEPS[name]
    page = timeline_page(step, f"a <step> of {name}")
    parser = Well()
    parser.feed(page)
    assert not parser.open
    assert "<step>" not in page
    wide = page[page.index('<svg viewBox="0 0 7680') :]
    root = ElementTree.fromstring(wide[: wide.index("</svg>") + len("</svg>")])
    labels = {float(each.get("y", "")): each.text for each in root.iter("text") if each.get("text-anchor") == "end"}
    assert len(labels) == len(step.lanes)
    scale = (7680 - 150 - 10) / step.seconds
    drawn: dict[str, float] = {}
    for box in root.iter("rect"):
        x, width, y = (float(box.get(key, "")) for key in ("x", "width", "y"))
        assert x + width <= 7680 - 10 + 0.5 or "offload" in name
        lane = next(label for at, label in labels.items() if abs(at - y - 12) < 1)
        drawn[str(lane)] = drawn.get(str(lane), 0.0) + width / scale
        assert box.find("title") is not None
    words = {"node": "links of the node"}
    for lane, seconds in step.lanes.items():
        rank, _, resource = lane.partition(" ")
        # What is joined covers the gaps between, and what is too small to be seen is drawn a little wider.
        assert drawn[f"rank {rank}: {words.get(resource, resource)}"] == pytest.approx(seconds, rel=0.1, abs=60 / scale)


@pytest.mark.parametrize("name", STEPS)
def test_the_trace_has_every_event_once_on_a_named_thread(name: str) -> None:
    step = STEPS[name]
    trace = json.loads(trace_json(step))
    named = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "thread_name"
    }
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(spans) == len(step.trace)
    busy: dict[str, float] = {}
    for each in spans:
        lane = f"{each['pid']} {named[each['pid'], each['tid']]}"
        busy[lane] = busy.get(lane, 0.0) + each["dur"] / 1e6
    assert busy == pytest.approx(dict(step.lanes))
    for lane in named:  # one thing at a time
        mine = sorted((each["ts"], each["ts"] + each["dur"]) for each in spans if (each["pid"], each["tid"]) == lane)
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(mine))


def test_shares_are_told_and_add_up() -> None:
    step = STEPS["pipeline"]
    page = timeline_page(step, "a step")
    assert "Waiting for other pipeline ranks" in page
    told = json.loads(trace_json(step))["otherData"]
    assert sum(value for key, value in told.items() if key != "seconds") == pytest.approx(told["seconds"])
