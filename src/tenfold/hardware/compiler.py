"""What torch.compile needs on a CPU."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def missing_for_compile() -> list[str]:
    """What has to be installed before torch.compile works on this CPU, in words."""
    missing = [] if compiler() else ["a C++ compiler (g++)"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python's headers (python3-dev)")
    return missing
