"""Tenfold: pretrain language models far larger than the machine. Share layers, delink them, train on.

`share` and `delink` work on any model's list of layers; docs/library.md tells how.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenfold.sharing.api import delink, share
    from tenfold.sharing.measuring import Measurement

__version__ = "0.1.0"
__all__ = ["Measurement", "__version__", "delink", "share"]


def __getattr__(name: str) -> Any:
    # Found when asked for, so that the command line's help need not wait for PyTorch.
    if name in ("share", "delink"):
        from tenfold.sharing import api

        return getattr(api, name)
    if name == "Measurement":
        from tenfold.sharing.measuring import Measurement

        return Measurement
    raise AttributeError(f"module 'tenfold' has no attribute {name!r}")
