"""What of a run lies where, and within which memory, as a run file states it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tenfold.config.base import Section
from tenfold.config.depth import Experts, Layers, experts_of, places_of
from tenfold.config.units import Budget, Bytes, flag
from tenfold.errors import TenfoldError

Where = Literal["device", "host", "disk"]
Key = Callable[[str], str]
"""Gives a key of the section its path in the run file."""


class PlacementRule(Section):
    """Where the state of some layers lies between uses; what no rule names stays on the device, and later rules win."""

    layers: Layers = Field(
        description='Which: "all" (embedding and head, too), "3", "4-11", "0-3,8", "every 2", "every 2 from 1", '
        '"embedding", "head". What several layers share leaves the device only if rules send it off for all of them.'
    )
    experts: Experts | None = Field(
        None,
        description='Of their routed experts these alone, in a mixture: "all", "3", "8-63", "0-3,8", "every 2"; unset: '
        "the rule is of all that layers have. Not for activations.",
    )
    weights: Where | None = Field(
        None, description="Their weights (those of embedding and head stay on the device); unset: as rules before."
    )
    gradients: Where | None = Field(None, description="Their gradients; unset: as rules before.")
    moments: Where | None = Field(None, description="Their optimizer state; unset: as rules before.")
    activations: Literal["keep", "host", "disk"] | None = Field(
        None, description="What they keep for the backward pass; unset: as rules before. Recompute: [training]."
    )

    @model_validator(mode="after")
    def _check(self) -> PlacementRule:
        if not self.kinds:
            raise ValueError(
                f"the rule for layers {self.layers!r} says nothing: give weights, gradients, moments or activations"
            )
        if self.experts is not None and self.activations is not None:
            raise ValueError(
                f"experts = {self.experts!r} and activations: those of a layer come and go together; name them in a "
                "rule without experts"
            )
        return self

    @property
    def kinds(self) -> dict[str, Where]:
        """The tier of every kind of state that the rule names."""
        given = self.model_dump(include={"weights", "gradients", "moments", "activations"}, exclude_none=True)
        return {kind: "device" if tier == "keep" else tier for kind, tier in given.items()}


class OffloadConfig(Section):
    """State kept below the device while it is not in use: see docs/offload.md. Off without a budget or rules."""

    device_budget: Budget = Field(
        None,
        description='Bytes of the device\'s memory that the run may use, "20GiB", or a share of it, "60%" (without an '
        "accelerator: of RAM, or the control group's limit); what does not fit goes below. Unset: no budget.",
    )
    host_budget: Bytes = Field(
        None,
        description="Bytes of pinned RAM beside an accelerator, of each rank; unset: what limits of the system allow.",
    )
    disk: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Folders on fast disks, used side by side; empty: nothing goes to disk."
    )
    placement: list[PlacementRule] = Field([], description="Rules in place of a budget.")
    activations: bool = Field(
        False, description="Let a budget move activations, too: those of layers that do not recompute."
    )
    step_in_backward: bool = Field(
        False,
        description="Update weights as soon as their gradient is whole, in the last backward pass of a step, so that "
        "few gradients exist at once; needs optim.clip = 0.",
    )

    @property
    def on(self) -> bool:
        """Whether anything may leave the device."""
        return self.device_budget is not None or bool(self.placement)

    def of_stage(self, override: str | dict[str, Any] | None) -> OffloadConfig:
        """This with what a stage has otherwise. Its budget takes the place of the run's rules, and its rules that of
        the run's budget."""
        if override is None:
            return self
        if override == "off":
            return OffloadConfig()
        assert isinstance(override, dict)
        given = self.model_dump(exclude_defaults=True)
        if "device_budget" in override:
            given.pop("placement", None)
        elif "placement" in override:
            given.pop("device_budget", None)
            given.pop("activations", None)
        return OffloadConfig.model_validate({**given, **override})

    def check(
        self,
        key: Key,
        depth: int,
        recomputed: Collection[int],
        clip: float,
        experts: int = 0,
        optimizer: str = "adamw",
    ) -> None:
        """Raise ValueError where keys exclude each other in a model of `depth` layers, of which `recomputed` do that,
        with so many `experts` in each.

        `clip` is optim.clip and `optimizer` optim.name; `key` gives a key of this section its path.
        """
        if self.device_budget is not None and self.placement:
            raise ValueError(
                f"{key('device_budget')} and {key('placement')} exclude each other: what a budget moves is found out, "
                "and what rules move is what they say"
            )
        if self.step_in_backward and clip:
            raise ValueError(
                f"{key('step_in_backward')} = true updates weights before the norm of all gradients is known, and "
                f"optim.clip = {clip:g} goes by it: set optim.clip = 0, or leave step_in_backward out"
            )
        if self.activations and self.placement:
            raise ValueError(
                f"{key('activations')} = true is for a budget: rules of {key('placement')} name activations themselves"
            )
        if self.activations and len(recomputed) == depth:
            raise ValueError(
                f"{key('activations')} = true moves what layers keep, and training.recompute makes it again in every "
                "layer: leave one out, or set training.recompute_layers to fewer"
            )
        for number, rule in enumerate(self.placement):
            path = f"{key('placement')}.{number}"
            try:
                places = places_of(rule.layers, depth)
            except ValueError as error:
                raise ValueError(f"{path}.layers: {error}") from None
            _check_experts(rule, path, places.isdisjoint(range(depth)), experts, optimizer)
            for kind, tier in rule.kinds.items():
                if tier == "disk" and not self.disk:
                    raise ValueError(f'{path}.{kind} = "disk" needs a folder: set {key("disk")}')
                if kind == "gradients" and tier != "device" and self.step_in_backward:
                    raise ValueError(
                        f'{path}.gradients = "{tier}" has gradients wait for the step, and {key("step_in_backward")} = '
                        "true uses each at once: leave one out"
                    )
            if rule.weights in ("host", "disk") and ("embedding" in rule.layers or "head" in rule.layers):
                raise ValueError(
                    f'{path}.weights = "{rule.weights}", and {path}.layers = {rule.layers!r}: the weights of embedding '
                    "and head stay on the device; name layers, or leave weights out"
                )
            if rule.activations is not None and places.isdisjoint(range(depth)):
                raise ValueError(
                    f"{path}.activations is of layers, and {path}.layers = {rule.layers!r} names none of them"
                )
        below = self.below("activations", key, depth)
        for layer in sorted(below.keys() & set(recomputed)):
            raise ValueError(
                f"{below[layer]} moves what layer {layer} keeps, and training.recompute makes it again: name other "
                "layers there, or set training.recompute_layers to fewer"
            )

    def below(self, kind: str, key: Key, depth: int) -> dict[int, str]:
        """Places of a model of `depth` layers (-1: embedding, `depth`: head) whose state of a kind rules send below the
        device, with the words of the rule."""
        found: dict[int, str] = {}
        for number, rule in enumerate(self.placement):
            if kind in rule.kinds:
                places, tier = places_of(rule.layers, depth), rule.kinds[kind]
                if rule.experts is None:  # else the others stay as they were
                    found = {place: told for place, told in found.items() if place not in places}
                if tier != "device":
                    found |= dict.fromkeys(places, f'{key("placement")}.{number}.{kind} = "{tier}"')
        return found

    def check_staying(self, key: Key, depth: int, staying: Mapping[str, str], late: str = "") -> None:
        """Raise TenfoldError where rules send below the device what has to stay there (see `staying`), or the optimizer
        is to step before gradients are whole (see `late`)."""
        for kind, why in staying.items():
            if told := self.below(kind, key, depth):
                raise TenfoldError(
                    f"{next(iter(told.values()))} lets them leave the device, and they have to stay: {why}. Leave one "
                    "of them out"
                )
        if self.step_in_backward and (why := staying.get("gradients", late)):
            raise TenfoldError(
                f"{key('step_in_backward')} = true uses gradients in the backward pass, and they have to stay: "
                f"{why}. Leave one of them out"
            )

    def check_device(self, key: Key, device: str) -> None:
        """Raise TenfoldError where tiers are not there on a machine that computes on `device` ("cpu" or "cuda")."""
        if not self.on or device != "cpu":
            return
        if self.host_budget is not None:
            raise TenfoldError(
                f"{key('host_budget')} is for pinned RAM beside an accelerator, and this run computes on the CPU, "
                f"whose RAM is the device: set {key('device_budget')}"
            )
        for number, rule in enumerate(self.placement):
            for kind, tier in rule.kinds.items():
                if tier == "host":
                    raise TenfoldError(
                        f'{key("placement")}.{number}.{kind} = "host", and this run computes on the CPU, whose RAM is '
                        f'the device: there is no host below it. Take "disk", with folders in {key("disk")}'
                    )
        if self.device_budget is not None and not self.disk:
            raise TenfoldError(
                f"{key('device_budget')} is set, and this run computes on the CPU, below whose RAM there is only disk: "
                f"name folders on fast disks in {key('disk')}"
            )


def _check_experts(rule: PlacementRule, path: str, outside: bool, experts: int, optimizer: str) -> None:
    """Raise ValueError where a rule names experts that are not there; `outside`: it names no layer."""
    if rule.experts is None:
        return
    told = f"{path}.experts = {rule.experts!r}"
    if not experts:
        raise ValueError(f"{told}, and this model is dense: leave it out, or set model.moe.experts")
    if outside:
        raise ValueError(f"{told} is of layers, and {path}.layers = {rule.layers!r} names none of them")
    if optimizer == "adafactor":
        raise ValueError(
            f'{told}, and optim.name = "adafactor" steps all experts of a layer together, by the norm of their update: '
            "leave experts out, or take adamw"
        )
    try:
        experts_of(rule.experts, experts)
    except ValueError as error:
        raise ValueError(f"{path}.experts: {error}") from None


def staying(optimizer: str, compiled: bool, schedule: str, degrees: Mapping[str, int]) -> dict[str, str]:
    """The kinds of state that cannot leave the device in a run on ranks of these `degrees`, each with what keeps it.

    `optimizer` is optim.name, `compiled` training.compile, `schedule` parallel.pipeline_schedule.
    """
    found = {}
    if compiled:
        found["weights"] = "training.compile = true makes layers into code that does not fetch them"
    if degrees["pipeline"] > 1 and schedule in ("interleaved-zero-bubble", "zbv"):
        found["gradients"] = f"parallel.pipeline_schedule = {schedule} puts off those of weights, and has them at once"
    for axis in ("data_replicate", "data_shard", "context"):
        if optimizer == "muon" and degrees[axis] > 1:
            why = f'optim.name = "muon" makes whole matrices orthogonal, and parallel.{axis} = {degrees[axis]} '
            found |= dict.fromkeys(("weights", "gradients", "moments"), why + "splits what each rank steps by itself")
    return found


def late(degrees: Mapping[str, int]) -> str:
    """Why gradients are not whole in the last backward pass of a step on ranks of these `degrees`; "": they are."""
    for axis in ("tensor", "pipeline"):
        if degrees[axis] > 1:
            return f"parallel.{axis} = {degrees[axis]} adds up those of ranks behind the backward pass"
    return ""


def check_stages(
    run: OffloadConfig,
    overrides: Sequence[str | dict[str, Any] | None],
    depth: int,
    recomputed: Sequence[Collection[int]],
    clip: float,
    experts: int = 0,
    optimizer: str = "adamw",
) -> None:
    """Raise ValueError where what stages do (`OffloadConfig.check`) cannot be, or is told and does nothing.

    `recomputed` has, for each stage, the layers that do that.
    """
    on = [run.on]
    for number, override in enumerate(overrides):
        stage = run.of_stage(override)
        if stage.on:
            stage.check(key_of(number, override), depth, recomputed[number], clip, experts, optimizer)
        elif isinstance(override, dict):
            raise ValueError(
                f"stages.{number}.offload is set, and nothing is offloaded in that stage: give it device_budget or "
                "placement, or leave it out"
            )
        on.append(stage.on)
    if not any(on) and (given := list(run.model_dump(exclude_defaults=True))):
        raise ValueError(
            f"offload.{given[0]} is set, and nothing is offloaded: set offload.device_budget or offload.placement, or "
            "leave it out"
        )


def check_looking(on: Sequence[bool], by_rule: Sequence[bool], measured: Sequence[bool]) -> None:
    """Raise ValueError where gradients that may be away are to be looked at, layer by layer.

    For each stage: whether it is offloaded, ends by a rule, and begins with moments that are measured.
    """
    for number, (offloaded, rule, measure) in enumerate(zip(on, by_rule, measured, strict=True)):
        if offloaded and rule:
            raise ValueError(
                f'stages.{number}.until = "auto" looks at the gradients of layers, and offload moves them: say where '
                f'the stage ends, or set stages.{number}.offload = "off"'
            )
        if measure and (offloaded or (number > 0 and on[number - 1])):
            there = number if offloaded else number - 1
            raise ValueError(
                f'stages.{number}.moments = "measure" looks at the gradients of layers, and stage {there} is offloaded'
                ': take "rescale", "copy" or "reset", or leave offload out'
            )


def key_of(number: int, override: str | dict[str, Any] | None) -> Key:
    """The path in the run file of a key as it holds in stage `number`: of the stage's own, else of [offload]."""
    own = override if isinstance(override, dict) else {}
    return lambda name: f"stages.{number}.offload.{name}" if name in own else f"offload.{name}"


def parse_override(value: Any) -> str | dict[str, Any]:
    """Keys of [offload] that a stage has otherwise, {device_budget = "20GiB"}, or "off".

    On the command line device_budget=20GiB,disk=/a,disk=/b, without rules.
    """
    if value == "off":
        return "off"
    if isinstance(value, str):
        found: dict[str, Any] = {}
        for part in value.strip().removeprefix("{").removesuffix("}").split(","):
            key, _, item = (each.strip(" \"'") for each in part.partition("="))
            if key == "disk":
                found.setdefault(key, []).append(item)
            else:
                found[key] = {"true": True, "false": False}.get(item.lower(), item)
        value = found
    if not isinstance(value, dict) or not value:
        raise ValueError('expected keys of [offload], for example {device_budget = "20GiB"}, or "off"')
    try:
        return OffloadConfig.model_validate(value).model_dump(exclude_unset=True)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            raise ValueError(
                f"there is no key {path!r}; the keys are {', '.join(OffloadConfig.model_fields)}"
            ) from None
        raise ValueError(f"{path} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}") from None


def _show(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    pairs = [(key, item) for key, items in value.items() for item in (items if key == "disk" else [items])]
    return ",".join(f"{key}={item}" for key, item in pairs)


Override = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(lambda value: None if value is None else parse_override(value)),
    flag(lambda text: None if text == "None" else parse_override(text), "device_budget=20GiB,disk=/a|off", _show),
]
