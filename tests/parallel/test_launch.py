"""How ranks find each other, share a machine, and end when one of them is in trouble."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.errors import TenfoldError
from tenfold.parallel.launch import World, check_peers, first_node, threads_for, world_of
from tenfold.parallel.peers import Peer, State, describe, ranks_named

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("launched.py")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-009,12]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_torchrun_tells_a_rank_its_place() -> None:
    assert world_of(TORCHRUN) == World(3, 8, 1, "a", 29500)
    assert world_of({}) == world_of({"WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_the_variables_is_told(name: str) -> None:
    with pytest.raises(TenfoldError, match=f"WORLD_SIZE is 8, and {name} is not set"):
        world_of({key: value for key, value in TORCHRUN.items() if key != name})


def test_ranks_that_cannot_be_are_told() -> None:
    with pytest.raises(TenfoldError, match="RANK is 8 of WORLD_SIZE 8"):
        world_of(TORCHRUN | {"RANK": "8"})
    with pytest.raises(TenfoldError, match="MASTER_PORT is 'x'"):
        world_of(TORCHRUN | {"MASTER_PORT": "x"})


def test_a_slurm_step_tells_a_rank_its_place() -> None:
    world = world_of(SLURM)
    assert (world.rank, world.size, world.local_rank, world.address) == (5, 8, 1, "gpu007")
    assert 1024 < world.port < 32768
    assert world.port != world_of(SLURM | {"SLURM_JOB_ID": "4712"}).port  # two jobs may meet on a node
    assert world_of(SLURM | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}).address == "b"
    assert world_of(SLURM | TORCHRUN) == world_of(TORCHRUN)  # torchrun inside of srun
    # A batch script is no step, though it knows how many tasks one would have.
    assert world_of({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "4711"}) == World()
    with pytest.raises(TenfoldError, match="SLURM_LOCALID is not set"):
        world_of({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("gpu[003-005,9]", "gpu003"),
        ("gpu[3,5]-ib,x", "gpu3-ib"),
        ("r[1-2]n[01-16],z", "r1n01"),
        ("n-1,n-2", "n-1"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_ranks_share_the_cores_that_they_may_both_use() -> None:
    together = [Peer("a", 1, cores="ff"), Peer("a", 2, cores="ff"), Peer("b", 3, cores="ff")]
    assert [threads_for(rank, together, 8) for rank in range(3)] == [4, 4, 8]
    bound = [Peer("a", 1, cores="0f"), Peer("a", 2, cores="f0")]
    assert [threads_for(rank, bound, 4) for rank in range(2)] == [4, 4]
    crowd = [Peer("a", number, cores="3") for number in range(5)]
    assert threads_for(0, crowd, 2) == 1


@pytest.mark.parametrize(("hosts", "each"), [("aaaa", 4), ("aabb", 2), ("aaaabb", 2), ("aab", 1)])
def test_ranks_of_a_machine_are_counted(hosts: str, each: int) -> None:
    watch: Any = SimpleNamespace(peers=[Peer(host, number) for number, host in enumerate(hosts)])
    assert World(0, len(hosts), watch=watch).per_machine == each
    assert World(0, 6).per_machine == 6


def test_ranks_on_one_gpu_or_on_unlike_devices_are_told() -> None:
    check_peers([Peer("a", 1, device="cuda", gpu="x"), Peer("a", 2, device="cuda", gpu="y")])
    with pytest.raises(TenfoldError, match="ranks 0 and 2 on a have one GPU between them"):
        check_peers([Peer(host, 1, device="cuda", gpu="x") for host in ("a", "b", "a")])
    with pytest.raises(TenfoldError, match="rank 1 on b computes on cpu, and rank 0 on a on cuda"):
        check_peers([Peer("a", 1, device="cuda", gpu="x"), Peer("b", 2)])


def test_ranks_are_named_in_ranges() -> None:
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([0, 1, 2, 7, 9, 8]) == "ranks 0-2, 7-9"
    assert ranks_named([1], [Peer("a", 1), Peer("b", 2)]) == "rank 1 on b"


def test_who_is_missing_and_where_all_are() -> None:
    def state(rank: int, what: str, still: float, now: float) -> State:
        return State(rank, 1, 1, what, 7, still, "", what == "gradients", now)

    states = {rank: state(rank, "gradients", 5.0, 100.0) for rank in range(4)}
    states[2] = state(2, "loading data", 1.0, 92.0)
    lines = describe([2], "does not answer", states, [Peer(host, 1) for host in "aabb"], 60.0).split("\n")
    assert lines[:3] == [
        "rank 2 on b does not answer",
        "  rank 2 on b: last seen 9 s ago in step 7, loading data",
        "  ranks 0-1, 3 on a, b: step 7, gradients, for 5 s",
    ]
    assert "--resume" in lines[3]
    assert "parallel.timeout (now 60 s)" in lines[3]


def test_a_process_that_ended_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = Peer.here()
        peer = Peer(here.host, process.pid, here.space)
        assert not peer.is_gone()
        process.kill()
        process.wait()
        assert peer.is_gone()
        assert not Peer("elsewhere", process.pid, "another machine").is_gone()  # nothing is known of it


@dataclass
class Ended:
    codes: list[int | None]
    told: str
    logs: list[str]

    @property
    def lines(self) -> list[str]:
        """Of the terminal, but for what rank 0 says without trouble."""
        return [line for line in self.told.splitlines() if line != "rank 0 says this"]


def launched(case: str, folder: Path, ranks: int = 2, timeout: float = 3.0) -> Ended:
    """Run `launched.py` on some ranks; all but those that are stopped must end."""
    command = [str(PROGRAM), case, str(folder), str(timeout)]
    return started(command, folder, [{}] * ranks, left=int(case == "stop"))


def free_port() -> int:
    """None of those that systems give to whoever asks: rank 0 takes seconds to start, and it could be taken."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def started(command: list[str], folder: Path, each: list[dict[str, str]], left: int = 0) -> Ended:
    """Start ranks without torchrun, with what is for `each` in its environment; all but the last `left` must end."""
    port = free_port()
    common = {
        "WORLD_SIZE": str(len(each)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    terminal = folder / "terminal"
    with terminal.open("wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), **own},
                stdout=output,
                stderr=output,
            )
            for rank, own in enumerate(each)
        ]
        try:
            for process in processes[: len(each) - left]:
                process.wait(120)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
    logs = [path.read_text() for path in sorted((folder / "logs").glob("rank-*.log")) if path.is_file()]
    return Ended(codes, terminal.read_text(), logs)


def assert_lines(ended: Ended, patterns: list[str]) -> None:
    """The terminal holds just these lines."""
    assert len(ended.lines) == len(patterns), ended.told
    for pattern, line in zip(patterns, ended.lines, strict=True):
        assert re.fullmatch(pattern, line), ended.told


@pytest.mark.slow
def test_what_all_ranks_meet_is_told_once(tmp_path: Path) -> None:
    ended = launched("alike", tmp_path)
    assert ended.codes == [2, 2]
    assert ended.told == "tenfold: model.hiden is no key\n"
    ended = launched("blind", tmp_path)
    assert ended.codes == [2, 2]
    assert ended.told.count("tenfold:") == 1
    assert "does not see" in ended.told
    assert "which is the run directory of rank 0 on" in ended.told


@pytest.mark.slow
def test_what_one_rank_meets_is_told_with_its_number(tmp_path: Path) -> None:
    ended = launched("own", tmp_path, ranks=3)
    assert ended.codes == [2, 2, 2]
    assert_lines(ended, [r"tenfold: rank 2 on \S+: shard 12 cannot be read"])
    assert ended.told.count("says this") == 1  # rank 0's own
    for log in ended.logs[:2]:
        assert re.search(r"rank 2 on \S+ stopped, and so does the run: shard 12 cannot be read", log)
    assert ["rank 1 says this" in log for log in ended.logs] == [False, True, False]
    assert "tenfold: shard 12 cannot be read" in ended.logs[2]


@pytest.mark.slow
def test_of_errors_that_ranks_have_each_for_itself_the_first_is_told(tmp_path: Path) -> None:
    ended = launched("unlike", tmp_path, ranks=3)
    assert ended.codes == [2, 2, 2]
    (line,) = ended.lines
    told = re.fullmatch(r"tenfold: rank (\d) on \S+: shard (\d) cannot be read", line)
    assert told, line
    assert told[1] == told[2]
    for rank, log in enumerate(ended.logs):
        assert f"tenfold: shard {rank} cannot be read" in log


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_rank_whose_log_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.log").symlink_to("/dev/full")
    ended = launched("hang", tmp_path)
    assert ended.codes == [2, 2]
    assert_lines(ended, [r"tenfold: rank 1 on \S+: a file: No space left on device"])


@pytest.mark.slow
def test_what_rank_0_meets_while_others_start_is_told_once(tmp_path: Path) -> None:
    ended = launched("early", tmp_path)
    assert ended.codes == [2, 2]
    assert_lines(ended, ["tenfold: rank 0: runs/x exists already"])


@pytest.mark.slow
def test_what_each_rank_reads_is_there_once_rank_0_has_read_it(tmp_path: Path) -> None:
    ended = launched("each", tmp_path, timeout=2.0)
    assert ended.codes == [0, 0], ended
    assert ["rank 0 made it" in ended.told, "rank 1 found it" in ended.logs[1]] == [True, True]
    # A file that only one rank does not see is that one's error.
    (tmp_path / "made").unlink()
    ended = launched("each-but-last", tmp_path, ranks=3)
    assert ended.codes == [2, 2, 2]
    assert_lines(ended, [r"tenfold: rank 2 on \S+: there is no file"])


@pytest.mark.slow
def test_a_fault_of_ours_has_another_code_and_its_traceback(tmp_path: Path) -> None:
    ended = launched("fault", tmp_path)
    assert ended.codes == [1, 1]
    assert re.fullmatch(r"tenfold: rank 1 on \S+: ValueError: a fault of ours", ended.lines[0])
    assert ended.told.count("tenfold: ") == 1
    assert "launched.py" in ended.logs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "why", "code"),
    [("hang", "did not come in", 75), ("stop", "does not answer", None), ("die", "is gone", -9)],
)
def test_a_rank_that_hangs_or_dies_is_named(case: str, why: str, code: int | None, tmp_path: Path) -> None:
    ended = launched(case, tmp_path, ranks=3)
    assert ended.codes == [75, 75, code], ended
    where = r"\(cli/ranks\.py:\d+\)"
    assert_lines(
        ended,
        [
            rf"tenfold: rank 2 on \S+ {why}.*",
            # One that was killed or stopped may not have told yet where that met it.
            rf"  rank 2 on \S+: last seen \d+ s ago in {'step 8, loading data' if case == 'hang' else ''}.*",
            rf"  ranks 0-1 on \S+: step 7, gradients {where}, for \d+ s",
            r"Look at what became of it, and start again with --resume\. .* parallel\.timeout \(now 3 s\) higher",
            rf"Stacks of the ranks: {re.escape(str(tmp_path / 'logs'))}",
        ],
    )
    for log in ended.logs[: 2 + (case == "hang")]:
        assert "most recent call first" in log  # a dump of its stacks
    if case == "hang":
        assert "in work" in ended.logs[2]


@pytest.mark.slow
def test_a_wait_for_data_may_be_longer_than_the_timeout(tmp_path: Path) -> None:
    ended = launched("patient", tmp_path, timeout=2.0)
    assert ended.codes == [0, 0]
    assert "prepared" in ended.logs[1]


@pytest.mark.slow
def test_torchrun_restarts_ranks_when_one_died(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, str(PROGRAM), "restart", str(tmp_path), "20"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"tenfold: rank 1 on \S+ is gone", done.stderr)
    logs = [path.read_text() for path in sorted((tmp_path / "logs").glob("rank-*.log"))]
    assert [log.count("=== ") for log in logs] == [2, 2]


SCRIPTS = [*sorted((ROOT / "examples" / "launch").iterdir()), ROOT / "docs" / "launch.md"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_flags_in_scripts_exist(path: Path) -> None:
    from tenfold.cli.train import USAGE
    from tenfold.config.load import leaves
    from tenfold.config.run import RunConfig

    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"\btenfold[\"', -]+train\b[^\n`]*", text)
    assert commands
    known = {f"--{key}" for key, _ in leaves(RunConfig())} | set(re.findall(r"--[a-z-]+", USAGE))
    flags = {flag for command in commands for flag in re.findall(r"--[a-z][\w.-]*", command)}
    assert flags <= known, flags - known


def test_the_slurm_script_is_one() -> None:
    script = ROOT / "examples" / "launch" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    assert "#SBATCH --signal=" in script.read_text()


def test_the_kubernetes_manifest_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "examples" / "launch" / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    command = " ".join(pod["containers"][0]["command"])
    assert f"--nnodes {job['spec']['completions']}" in command
    assert job["spec"]["backoffLimit"] > 0
    assert pod["terminationGracePeriodSeconds"] > 60
