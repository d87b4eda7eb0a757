"""The processes of a run: how torchrun or Slurm tells each its place, and how they come together; one alone needs none.

`World` is what a process knows of all of them. `join` reaches the store in which ranks tell what they do (`watch`);
`open_world` opens the process group, once it is known what they compute on.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tenfold.errors import RanksLost, TenfoldError
from tenfold.hardware.cores import usable_cores

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from tenfold.parallel.logs import RankLog
    from tenfold.parallel.peers import Peer
    from tenfold.parallel.watch import Watch

# PyTorch takes seconds to import: here only where there are many ranks, for one is told of its mistakes at once.

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STORE_SECONDS = 300.0  # in which all processes must have been started


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    watch: Watch | None = field(default=None, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and tells."""
        return self.rank == 0

    @property
    def per_machine(self) -> int:
        """Ranks on each machine; where these have differently many, the most into which all of them divide."""
        peers = self.watch.peers if self.watch is not None else []
        return math.gcd(*Counter(peer.host for peer in peers).values()) if peers else self.size

    def agreed(self, value: T) -> T:
        """What rank 0 gives as `value`, on every rank."""
        told = [value]
        if self.size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(told, 0)
        return told[0]

    def of_all(self, value: T) -> list[T]:
        """Every rank's `value`."""
        told = [value] * self.size
        if self.size > 1:
            import torch.distributed as dist

            dist.all_gather_object(told, value)
        return told

    def by_first(self, work: Callable[[], T]) -> T:
        """What `work` comes to on rank 0, which alone does it; what goes wrong there is raised on every rank."""
        return work() if self.size == 1 else _value(self.agreed(_outcome(work) if self.first else (None, None)))

    def at_leisure(self, what: str, work: Callable[[], T]) -> T:
        """As `by_first`, for work that may take hours: the others ask for it, and no timeout ends their wait."""
        if self.watch is None:
            return work()
        from tenfold.parallel.watch import doing

        key, store = f"leisure/{what}", self.watch.store
        doing(what if self.first else f"waiting for rank 0: {what}", patient=True)
        outcome: tuple[T | None, TenfoldError | None] = (None, None)
        if self.first:
            outcome = _outcome(work)
            store.set(key, "done")
        self.watch.wait_until(lambda: store.check([key]))
        doing("starting")
        return _value(self.agreed(outcome))

    def by_each(self, what: str, work: Callable[[], T]) -> T:
        """What `work` comes to on every rank, `at_leisure`. Rank 0 goes first: the others find what it leaves on disk,
        and what goes wrong there is raised on all."""
        done: list[T] = []
        self.at_leisure(what, lambda: done.append(work()))
        if self.watch is None:
            return done[0]
        from tenfold.parallel.watch import doing

        key, store = f"leisure/{what}/ranks", self.watch.store
        doing(what, patient=True)
        if not self.first:
            done.append(work())
        store.add(key, 1)
        self.watch.wait_until(lambda: store.add(key, 0) == self.size)
        doing("starting")
        return done[0]

    def explained(self, error: Exception) -> Exception:
        """What is to be told of an error: of one of the talk between ranks, which of them is lost."""
        if self.watch is None or isinstance(error, (TenfoldError, RanksLost)):
            return error
        from tenfold.parallel.watch import is_of_exchange

        return self.watch.explain(error) if is_of_exchange(error) else error

    def check_seen(self, paths: list[str], what: str) -> None:
        """Raise TenfoldError, on all ranks, where one does not see rank 0's files `paths`."""
        if self.size == 1:
            return
        told = self.agreed(paths)
        missing = next((path for path in told if not _appears(Path(path))), None)
        found = self.of_all((missing, socket.gethostname()))
        blind = [rank for rank, (path, _) in enumerate(found) if path is not None]
        if blind:
            path, host = found[blind[0]]
            more = f" (nor do {len(blind) - 1} others)" if len(blind) > 1 else ""
            raise TenfoldError(
                f"rank {blind[0]} on {host} does not see {path}, {what} of rank 0 on {found[0][1]}{more}: name a "
                "folder that all machines share"
            )


ONE = World()


def _outcome(work: Callable[[], T]) -> tuple[T | None, TenfoldError | None]:
    try:
        return work(), None
    except TenfoldError as error:
        return None, error


def _value(outcome: tuple[T | None, TenfoldError | None]) -> T:
    value, fault = outcome
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]


def _appears(path: Path, seconds: float = 5.0) -> bool:
    """Whether a file is there; a network's file system may take a moment."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def world_of(environment: Mapping[str, str]) -> World:
    """The processes that the environment tells of, by torchrun's variables or those of a Slurm step.

    TenfoldError where it tells half of it.
    """
    if "WORLD_SIZE" not in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_slurm(environment)
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        raise TenfoldError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, and {', '.join(missing)} is not set: start all processes by "
            "torchrun, or by Slurm's srun (docs/launch.md)"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise TenfoldError(f"{name} is {environment[name]!r}, which is no number (docs/launch.md)")
        numbers[name] = int(environment[name])
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise TenfoldError(f"RANK is {numbers['RANK']} of WORLD_SIZE {numbers['WORLD_SIZE']}: ranks count from 0")
    return World(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        environment["MASTER_ADDR"],
        numbers["MASTER_PORT"],
    )


def _of_slurm(environment: Mapping[str, str]) -> World:
    """The place in a Slurm step of several tasks. Rank 0 is on the step's first node; the port hangs on the job."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    missing = [name for name in needed if name not in environment]
    if missing:
        raise TenfoldError(
            f"this is one of {environment['SLURM_STEP_NUM_TASKS']} tasks of a Slurm step, and {', '.join(missing)} is "
            "not set: start them by srun and hand on its environment (docs/launch.md)"
        )
    job, step = (int(re.sub(r"\D", "", environment.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return World(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_LOCALID"]),
        environment.get("MASTER_ADDR") or first_node(environment["SLURM_STEP_NODELIST"]),
        int(environment.get("MASTER_PORT") or 15000 + (7 * job + step) % 15000),  # below the ports that systems give
    )


def first_node(nodes: str) -> str:
    """The first of a list as Slurm writes it: "gpu[003-005,9]-ib,login1" -> "gpu003-ib"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def join(world: World, log: RankLog) -> World:
    """Reach the store of the run, and have this rank watched from now on."""
    from tenfold.parallel.watch import Watch

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun's agent of the first node" if agent else "rank 0"
    store = _store(world, serve=world.first and not agent)
    return replace(world, watch=Watch(world.rank, world.size, store, log, keeper))


@contextmanager
def open_world(world: World, device: str, timeout: float) -> Iterator[None]:
    """Open the process group of `world`, which was joined; `device` is "cpu" or "cuda". A lone process needs none.

    Raises TenfoldError where what ranks compute on does not fit them, RanksLost when some do not come.
    """
    if world.watch is None:
        yield
        return
    import torch
    import torch.distributed as dist

    from tenfold.parallel.peers import Peer
    from tenfold.parallel.watch import GRACE

    gpu = _take_gpu(world) if device == "cuda" else ""
    cores = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}" if hasattr(os, "sched_getaffinity") else ""
    me = Peer.here(cores=cores, threads=threads_asked_for(), device=device, gpu=gpu)
    peers = world.watch.meet(me, max(timeout, _STORE_SECONDS))  # machines do not start alike
    world.watch.timeout = timeout
    check_peers(peers)
    if not peers[world.rank].threads:
        torch.set_num_threads(threads_for(world.rank, peers, usable_cores()))
    # What lies on the host (state, words between ranks) goes by gloo. Ranks name who is missing before it gives up.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout + GRACE),
        store=_store(world, serve=False),
    )
    yield
    # After an error it stays open: the process ends without asking the others.
    dist.destroy_process_group()


def _take_gpu(world: World) -> str:
    """Compute on this rank's GPU; its name of its own. One that a scheduler bound to this task is its only one."""
    import torch

    count = torch.cuda.device_count()
    if world.local_rank >= count > 1:
        raise TenfoldError(
            f"rank {world.rank} is number {world.local_rank} of its machine, {socket.gethostname()}, which has {count} "
            f'GPUs: start no more than {count} processes there, or set training.device = "cpu"'
        )
    torch.cuda.set_device(min(world.local_rank, count - 1))
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def check_peers(peers: list[Peer]) -> None:
    """Raise TenfoldError where ranks compute on different kinds of devices, or two on one GPU."""
    owners: dict[tuple[str, str], int] = {}
    for rank, peer in enumerate(peers):
        if peer.device != peers[0].device:
            raise TenfoldError(
                f"rank {rank} on {peer.host} computes on {peer.device}, and rank 0 on {peers[0].host} on "
                f'{peers[0].device}: set training.device = "{peer.device}", or see why they differ'
            )
        other = owners.setdefault((peer.host, peer.gpu), rank) if peer.gpu else rank
        if other != rank:
            raise TenfoldError(
                f"ranks {other} and {rank} on {peer.host} have one GPU between them: start as many processes on a "
                'machine as it has GPUs (--nproc-per-node), or set training.device = "cpu"'
            )


def threads_asked_for() -> int:
    """The OpenMP threads that the user asked for; 0: none. torchrun sets one where nobody did."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not asked.isdecimal():
        return 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:  # with what torchrun was started
            given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:
            return int(asked)
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in given):
            return 0
    return int(asked)


def threads_for(rank: int, peers: list[Peer], cores: int) -> int:
    """Threads for a rank of those that share its `cores`: more threads than cores make products collapse."""
    mine = peers[rank]
    sharing = sum(peer.host == mine.host and peer.cores == mine.cores and not peer.threads for peer in peers)
    return max(1, cores // max(1, sharing))


def _store(world: World, serve: bool) -> Store:
    """Where ranks find each other. After an elastic restart the addresses of the attempt before are not to be found."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    where = f"{world.address}:{world.port}"
    try:
        store = TCPStore(
            world.address,
            world.port,
            world.size,
            is_master=serve,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
        )
    except dist.DistError as error:
        if serve:
            raise TenfoldError(
                f"rank 0 on {socket.gethostname()} cannot serve at {where} ({str(error).splitlines()[0]}): set "
                "MASTER_PORT to a free port, and MASTER_ADDR to this machine"
            ) from None
        raise TenfoldError(
            f"rank {world.rank} on {socket.gethostname()} did not reach rank 0 at {where} in {_STORE_SECONDS:.0f} s: "
            "see whether it was started, and whether MASTER_ADDR and MASTER_PORT can be reached from there"
        ) from None
    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
