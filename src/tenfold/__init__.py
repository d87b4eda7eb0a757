"""Tenfold: pretrain language models far larger than the machine. Share layers, delink them, train on.

`share`, `divide_updates`, `delink` and `offload` work on anyone's model and loop; docs/library.md tells how. `plan`
says what fits and how fast it is, before anything runs (docs/planning.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenfold.offload.api import offload
    from tenfold.planning.api import plan
    from tenfold.sharing.api import delink, share
    from tenfold.sharing.measuring import Measurement
    from tenfold.sharing.rates import divide_updates

__version__ = "0.1.0"
__all__ = ["Measurement", "__version__", "delink", "divide_updates", "offload", "plan", "share"]


def __getattr__(name: str) -> Any:
    # Found when asked for, so that the command line's help need not wait for PyTorch.
    if name in ("share", "delink"):
        from tenfold.sharing import api

        return getattr(api, name)
    if name == "offload":
        from importlib import import_module

        return import_module("tenfold.offload")  # which can be called
    if name == "plan":
        from tenfold.planning.api import plan

        return plan
    if name == "Measurement":
        from tenfold.sharing.measuring import Measurement

        return Measurement
    if name == "divide_updates":
        from tenfold.sharing.rates import divide_updates

        return divide_updates
    raise AttributeError(f"module 'tenfold' has no attribute {name!r}")
