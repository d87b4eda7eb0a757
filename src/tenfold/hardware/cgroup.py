"""Limits that a Linux control group (a container, a batch job) sets below what the machine has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def group_folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of this process's groups, v2 and v1, from its own up to the top: a limit on any of them binds.

    `controller` is the v1 name ("memory", "cpu"). `root` is where the file tree with /proc and /sys starts.
    """
    tree = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, inside = rest.partition(":")
        if number == "0" and not names:
            tops = [tree, tree / "unified"]
        elif controller in names.split(","):
            tops = [tree / controller, tree / names]
        else:
            continue
        # Inside a container the path may be one that only the host sees; the folders above it still hold our limit.
        parts = [part for part in PurePosixPath(inside).parts if part not in ("/", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def memory_limit(root: Path = ROOT) -> int | None:
    """The smallest memory limit in bytes, or None where no group sets one."""
    found = []
    for folder in group_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(folder / name).strip()
            if text.isdigit():  # v2 writes "max" for no limit
                found.append(int(text))
    return min(found, default=None)


def memory_room(root: Path = ROOT) -> int | None:
    """Bytes that the groups' limits leave; pages of files, which the kernel gives up when asked, count as free."""
    found = []
    for folder in group_folders("memory", root):
        for limit, usage, file_pages in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = (read_text(folder / name).strip() for name in (limit, usage))
            if most.isdigit() and used.isdigit():
                given_up = re.search(rf"^{file_pages} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
                found.append(max(0, int(most) - int(used) + (int(given_up[1]) if given_up else 0)))
    return min(found, default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """The smallest quota in cores, or None where no group sets one."""
    found = []
    for folder in group_folders("cpu", root):
        quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = read_text(folder / "cpu.cfs_quota_us").strip()
            period = read_text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # "max" (v2) and "-1" (v1) are no quota
            found.append(int(quota) / int(period))
    return min(found, default=None)


def read_text(path: Path) -> str:
    """A small file of /proc or /sys, or "" where this machine has none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
