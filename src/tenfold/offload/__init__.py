"""Any layer's state on device, host or disk, moved in the background while the device computes.

The package can be called: `tenfold.offload(model, optimizer, ...)` is `tenfold.offload.api.offload`.
"""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from tenfold.offload.api import offload

        return offload(*arguments, **named)


sys.modules[__name__].__class__ = _Package
