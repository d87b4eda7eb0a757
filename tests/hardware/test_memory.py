"""Memory that freed tensors leave behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Pages that had to be mapped while a tensor of 80 MB (19,532 pages of 4 KiB) is made and dropped ten times, after it
# was made and dropped forty times.
COUNT_FAULTS = """
import resource, torch
from tenfold.hardware.memory import keep_freed_memory

kept = {call}
for _ in range(40):  # until the heap has a place for it that nothing small settles in
    torch.zeros(20_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.zeros(20_000_000)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **environment: str) -> tuple[str, int]:
    kept, count = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS.format(call=call)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return kept, int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_is_freed_serves_the_next_tensor_without_new_pages() -> None:
    assert faults("None", THP_MEM_ALLOC_ENABLE="0")[1] > 150_000
    kept, count = faults("keep_freed_memory()", THP_MEM_ALLOC_ENABLE="0")
    assert kept == "True"
    assert count < 50_000


def test_what_a_user_has_set_stays() -> None:
    assert faults("keep_freed_memory()", MALLOC_MMAP_MAX_="65536")[0] == "False"


def test_freed_tensors_go_back_to_the_system_where_that_is_asked_for() -> None:
    script = (
        "import torch; from tenfold.hardware.memory import memory_used_bytes, return_freed_memory\n"
        "cpu = torch.device('cpu'); torch.ones(2**23); done = return_freed_memory()\n"
        "before = memory_used_bytes(cpu)\n"
        "many = [torch.ones(2**20) for _ in range(32)]; between = [torch.ones(2**16) for _ in range(8)]\n"
        "held = memory_used_bytes(cpu); del many\n"
        "print(done, held - before, memory_used_bytes(cpu) - before)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    done, held, kept = shown[0], int(shown[1]), int(shown[2])
    if done == "False":
        pytest.skip("a C library without mallopt")
    assert held > 120 * 2**20
    assert kept < 8 * 2**20
