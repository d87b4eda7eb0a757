"""The process group of a run that torchrun started, or a scheduler by the same variables; none for one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tenfold.errors import TenfoldError

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and tells."""
        return self.rank == 0

    def agreed(self, value: T) -> T:
        """What rank 0 gives as `value`, on every rank."""
        told = [value]
        if self.size > 1:
            dist.broadcast_object_list(told, 0)
        return told[0]

    def by_first(self, work: Callable[[], T]) -> T:
        """What `work` comes to on rank 0, which alone does it; what goes wrong there is raised on every rank."""
        if self.size == 1:
            return work()
        told: tuple[T | None, TenfoldError | None] = (None, None)
        if self.first:
            try:
                told = (work(), None)
            except TenfoldError as error:
                told = (None, error)
        value, fault = self.agreed(told)
        if fault is not None:
            raise fault
        return value  # type: ignore[return-value]


ONE = World()


def world_of(environment: dict[str, str]) -> World:
    """The processes that the environment tells of; TenfoldError where it tells half of it."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        raise TenfoldError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, and {', '.join(missing)} is not set: start all processes by "
            "torchrun (docs/parallel.md)"
        )
    return World(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"]))


@contextmanager
def open_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Join the processes of this run while it is open; `device` is "cpu" or "cuda"."""
    world = world_of(dict(os.environ))
    if world.size == 1:
        yield world
        return
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    # What lies on the host (state, words between ranks) goes by gloo.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_seconds), store=_store(world)
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _store(world: World) -> Store:
    """Where ranks find each other. After an elastic restart the addresses of the attempt before are not to be found."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world.size,
        is_master=world.first and not agent,
        wait_for_workers=False,
    )
    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
