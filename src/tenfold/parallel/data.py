"""Data parallelism by FSDP2: what each data rank keeps of the weights, when it has them whole, and where gradients go.

A segment is one group: however many layers share its parameters, these are gathered once in a forward pass, once more
in the backward pass where they were let go in between, and their gradients are reduced once. What a layer of a segment
has to itself, and is large, is a group of its own. Replicas (HSDP) add their gradients up behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage

from tenfold.config.parallel import ParallelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import differing, read_plainly
from tenfold.nn.moe import MixtureOfExperts
from tenfold.parallel.mesh import Mesh


def shard(
    model: Decoder,
    segments: Sequence[Sequence[nn.Module]],
    by_expert: set[nn.Parameter],
    mesh: Mesh,
    config: ParallelConfig,
) -> None:
    """Split the parameters of `model`, which may be on the meta device, over the data ranks of `mesh`, in place.

    `segments` are its layers, segment by segment, `by_expert` the parameters that expert ranks have different parts of.
    Nothing happens where no other rank uses the same parameters.
    """
    if mesh.fsdp is None:
        return
    # Balancing biases are not trained, and few: every rank has them whole.
    ignored = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if mesh.expert_fsdp is None:
        ignored |= by_expert
    pipeline = mesh.degrees.pipeline > 1
    for segment in segments:
        for column in _own_groups(list(segment), by_expert):
            experts = not by_expert.isdisjoint(column[0].parameters())
            if (group := mesh.expert_fsdp if experts else mesh.fsdp) is not None:
                _group(column, group, config, ignored, pipeline)
        _group(list(segment), mesh.fsdp, config, ignored, pipeline)
    _group([model], mesh.fsdp, config, ignored, pipeline, root=True)
    if pipeline:
        whole_while_called(model)


def _group(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    config: ParallelConfig,
    ignored: set[nn.Parameter],
    pipeline: bool,
    root: bool = False,
) -> None:
    bf16 = config.gather == "bf16"
    # What modules are given is left as it is: gates are fp32, and rows may still be on their way.
    cast = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    policy = MixedPrecisionPolicy(**cast, cast_forward_inputs=False)
    # The root's stay: the output matrix is used behind the last layer, and at once again in the backward pass.
    # Those of pipeline stages stay through the step, whose passes come in the order of a schedule.
    keep = root or config.reshard != "forward" or pipeline
    options: Any = {"reshard_after_forward": not keep, "mp_policy": policy, "ignored_params": ignored}
    first = fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **options)
    head = first[0] if isinstance(first, list) else first
    assert isinstance(head, FSDPModule)
    # Losses are shares of the whole already: gradients add up. Gloo can only add, and would not scale.
    head.set_force_sum_reduction_for_comms(True)
    head.set_gradient_divide_factor(1.0)


def _own_groups(members: list[nn.Module], by_expert: set[nn.Parameter]) -> list[list[nn.Module]]:
    """Of a segment's layers the modules that are groups of their own: experts that expert ranks split, which have other
    data ranks than the rest, and where some parts are shared those that are not."""
    columns: list[list[nn.Module]] = []
    for name in ("attention", "ffn"):
        column: list[nn.Module] = [getattr(layer, name) for layer in members]
        if isinstance(column[0], MixtureOfExperts):
            if column[0].router is None:  # what is dense is not called as a module
                continue
            column = [layer.ffn.experts for layer in members]  # type: ignore[union-attr,misc]
        experts = not by_expert.isdisjoint(column[0].parameters())
        if _shares(column):
            columns += [column] if experts else []
        elif experts or len(members) > 1:
            columns += [[each] for each in column]
    return columns


def _shares(column: Sequence[nn.Module]) -> bool:
    """Whether any two of these modules hold a parameter in common."""
    parameters = [parameter for module in column for parameter in set(module.parameters())]
    return len(set(parameters)) < len(parameters)


def look_again(model: Decoder) -> None:
    """Have FSDP2 find the memory that its parameters have got.

    It finds them by name, now and once more before it first gathers them: so that happens here, where a name is that of
    the parameter, and not of its sum with a layer's difference.
    """
    with read_plainly(), torch.no_grad():
        for group in groups_of(model):
            for each in group.fsdp_params:
                each.reset_sharded_param()
        if any(differing(module) for module in model.modules()):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()


def groups_of(model: Decoder) -> list[FSDPParamGroup]:
    """FSDP2's groups of parameters, in the order in which a forward pass first needs them."""
    found: list[FSDPParamGroup] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)
            found += getattr(state, "_fsdp_param_groups", [] if one is None else [one])
    order = {parameter: place for place, parameter in enumerate(model.layers.parameters())}

    def first(group: FSDPParamGroup) -> int:
        return min(order.get(each.sharded_param, -1) for each in group.fsdp_params)

    return sorted(dict.fromkeys(found), key=first)


def shards_of(group: FSDPParamGroup) -> dict[nn.Parameter, Tensor]:
    """Where the shards of a group's parameters lie between uses: flat, with what pads them."""
    return {each.sharded_param: each._sharded_param_data for each in group.fsdp_params}


def before_gathering(group: FSDPParamGroup, call: Callable[[bool], None]) -> None:
    """Have `call` called, with whether it is for a backward pass, before a group's shards are read."""
    gather, copy = group.unshard, group.wait_for_unshard

    def tell() -> None:
        call(group._training_state == TrainingState.PRE_BACKWARD)

    def unshard(async_op: bool = False) -> None:
        if group.is_unsharded or group._all_gather_result is not None:
            gather(async_op)
            return
        tell()
        reading = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)  # there is none before the first pass
        if group.device.type != "cuda" or reading is None:
            gather(async_op)
            return
        # Shards are read on a stream of FSDP2's own: behind what brought them, and before what takes their place.
        current = torch.cuda.current_stream()
        reading.wait_stream(current)
        gather(async_op)
        current.wait_stream(reading)

    def wait_for_unshard() -> None:
        # Where one rank has all of a shard (replicas) FSDP2 reads it only now.
        if group._all_gather_result is not None and group._all_gather_process_group.size() == 1:
            tell()
        copy()

    group.unshard, group.wait_for_unshard = unshard, wait_for_unshard  # type: ignore[method-assign]


def begin_schedule(model: Decoder) -> None:
    """Before the passes of a pipeline's schedule: weights stay whole, and gradients here, until `end_schedule`."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)


def end_schedule(model: Decoder) -> None:
    """Behind the last pass: data ranks exchange gradients, as FSDP2 does behind a backward pass of its own."""
    if isinstance(model, FSDPModule):
        reducing: Any = SimpleNamespace(submod=model)
        PipelineStage.perform_reduce_grad(reducing, 1)


def whole_while_called(model: Decoder) -> None:
    """Gather all weights before any pass. A pipeline's stages go through parts of the model, and so of FSDP2's groups,
    which are gathered by themselves only when gone through from their first module on."""

    def gather(_model: nn.Module, _inputs: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    model.register_forward_pre_hook(gather)


def begin_pass(model: Decoder, config: ParallelConfig, shards: int, last: bool) -> None:
    """Before a micro-batch, the step's last or not: whether its gradients are exchanged, and weights kept after it.

    Shards get theirs from every pass, so that no rank keeps all of them, unless the weights are kept too; replicas wait
    for the last pass.
    """
    if isinstance(model, FSDPModule):
        each = config.reshard != "step" and shards > 1
        model.set_requires_gradient_sync(each or last)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(each or last)


def let_go(model: Decoder) -> None:
    """Have each data rank hold its own share of the weights alone: before they change, are looked at, or saved."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
