"""An optimizer's `step` and `zero_grad` in our hands, and given back as they were."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from tenfold.errors import TenfoldError


class Taken:
    """Has `optimizer.step()` do `step`, and `optimizer.zero_grad()` do `clear` first, until `give_back`.

    They are bound as learning-rate schedulers want them, of which there may be some already or later. `native` is the
    step that the optimizer had.
    """

    def __init__(
        self, optimizer: Optimizer, step: Callable[[Optimizer], None], clear: Callable[[Optimizer], None]
    ) -> None:
        self._optimizer, self._over = optimizer, False
        self.native: Callable[..., Any] = optimizer.step
        zero_grad = optimizer.zero_grad

        def our_step(taken: Optimizer, closure: Any = None) -> Any:
            if self._over:  # whoever wrapped this one meanwhile calls it still
                return self.native() if closure is None else self.native(closure)
            if closure is not None:
                raise TenfoldError("a closure cannot be given to the step of an optimizer whose state is offloaded")
            return step(taken)

        def our_zero_grad(taken: Optimizer, set_to_none: bool = True) -> None:
            if not self._over:
                clear(taken)
            zero_grad(set_to_none)

        if hasattr(self.native, "_wrapped_by_lr_sched"):  # else a scheduler made before warns that it cannot see ours
            our_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._ours = {
            "step": types.MethodType(our_step, optimizer),
            "zero_grad": types.MethodType(our_zero_grad, optimizer),
        }
        self._before = {name: vars(optimizer)[name] for name in self._ours if name in vars(optimizer)}
        vars(optimizer).update(self._ours)

    def give_back(self) -> None:
        """The optimizer's own methods are there again; in those that others have put over ours, too."""
        self._over = True
        for name, ours in self._ours.items():
            if vars(self._optimizer).get(name) is ours:
                del vars(self._optimizer)[name]
                vars(self._optimizer).update({name: self._before[name]} if name in self._before else {})
