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
