"""What training refuses of a stage on many ranks, told before anything runs: training and the search ask the same."""

from __future__ import annotations

from dataclasses import asdict

from tenfold.config.offload import key_of, late, staying
from tenfold.config.run import OptimConfig, RunConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees, check
from tenfold.planning.stages import Stage


def check_trained(config: RunConfig, stage: Stage, degrees: Degrees) -> None:
    """Raise TenfoldError where `stage` of a run does not train on ranks of `degrees`, with its passes and schedule;
    `config` is the run's as the stage has it (`RunConfig.of_stage`)."""
    asked, training = config.parallel, config.training
    check(degrees, config.model, stage.batch_size, training.micro_batch_size, stage.lengths, asked)
    if degrees.pipeline > 1 and asked.slices > 1 and training.compile:
        raise TenfoldError(
            "parallel.pipeline_schedule = terapipe keeps keys and values outside of what torch.compile sees: "
            "set training.compile to false, or take another schedule, 1f1b, say"
        )
    check_optimizer(config.optim, degrees.tensor)
    for key, value in (("until", "auto" if stage.rule else ""), ("moments", stage.config.moments)):
        if degrees.ranks > 1 and value in ("auto", "measure"):
            raise TenfoldError(
                f'{key} = "{value}" looks at every layer\'s own gradient, which needs one rank; there are '
                f"{degrees.ranks}: take another {key}"
            )
    override = stage.config.offload
    number = next((number for number, each in enumerate(config.stages) if each.name == stage.name), 0)
    ranks = asdict(degrees)
    stay = staying(config.optim.name, training.compile, asked.pipeline_schedule, ranks)
    config.offload.of_stage(override).check_staying(key_of(number, override), config.model.layers, stay, late(ranks))


def check_optimizer(config: OptimConfig, tensor: int) -> None:
    """Raise TenfoldError for an optimizer that does not train on so many ranks along tensor."""
    if tensor > 1 and config.name == "muon":
        raise TenfoldError(
            f'optim.name = "muon" makes whole matrices orthogonal, and parallel.tensor = {tensor} splits them: '
            "take adamw, or data_shard in place of tensor"
        )
