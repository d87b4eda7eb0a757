"""A stage that begins on many ranks, or offloaded: its model is made anew, as it lies, from what the stage before had.

Nothing goes through a checkpoint. Each rank makes its own piece of every parameter, and of its state, from the same
piece of what that comes from, as delinking carries it (`checkpoint.saved`), in the tier where it is to be. Where it has
that, as all ranks do while only the sharing changes, nothing is exchanged; what it lacks it gets from the ranks that
have it (`parallel.relay`). No rank has more of a tensor than its pieces before and after: of one parameter at a time
besides the two models, of which the former, whose layers share, is the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenfold.checkpoint import tensors as files
from tenfold.checkpoint.gathered import Fetched
from tenfold.checkpoint.saved import Saved
from tenfold.checkpoint.tensors import Stored
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import Memory
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.parallel.layout import Layout
from tenfold.parallel.pieces import local_of
from tenfold.parallel.regions import shape_of
from tenfold.parallel.routes import Routes
from tenfold.sharing.delinking import Moments
from tenfold.sharing.lineage import Lineage
from tenfold.training.offloading import Begun
from tenfold.training.optimizers import fill_tensors, state_tensors

T = TypeVar("T")


def lay_out_anew(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    before: Layout,
    after: Layout,
    config: RunConfig,
    moments: Moments,
    begin: Callable[[Layout, Container[str]], Begun],
    fetched: Fetched,
) -> Begun:
    """The model and optimizers of layout `after`, from those of layout `before`, delinked where it shares less.

    `begin` makes them, with initial weights for the names that it is given; `fetched` gives what of the former is not
    on the device.
    Every rank must call it, with gradients cleared.
    """
    before.let_go(model)
    lineage = Lineage(before.whole, before.sharing, after.sharing)
    had = {name: parameter.data for name, parameter in before.named(model).items()}
    routes = Routes(before, after, lineage, before.number)
    coming = _Coming(routes, before, had, state_tensors(model, optimizers, before), fetched)
    betas, where = (config.optim.beta1, config.optim.beta2), "the stage before"
    saved = Saved(before.whole, before.sharing, coming.weights, coming.state, betas, where, routes.sets_for)
    weights, state = (_by_parameter(each) for each in saved.delinked(after.sharing, moments))
    made = begin(after, lineage.begun)  # these stay as they are initialised
    memory = None if made.offload is None else made.offload.filling
    targets = {name: {name: local_of(parameter.data)} for name, parameter in after.named(made.model).items()}
    of_state = {key: local_of(value) for key, value in state_tensors(made.model, made.optimizers, after).items()}
    targets_of_state = _by_parameter(of_state)
    left = set(targets) - lineage.begun
    keys = _by_parameter(coming.state)
    for source, names in routes.become.items():  # in the same order on every rank
        with coming.here([source]):
            for name in names:
                with coming.here([name + side for side in (LEFT, RIGHT) if name + side in routes.folded]):
                    _fill(targets.get(name), weights[name], memory)
        with coming.here(list(keys.get(source, ()))):
            for name in names:
                _fill(targets_of_state.get(name), state.get(name, {}), memory)
        left -= set(names)
    for name in sorted(left):  # new routers, which are whole
        for into, tensors in ((targets, weights), (targets_of_state, state)):
            _fill(into.get(name), {key: _own(after, key, each) for key, each in tensors.get(name, {}).items()}, memory)
    return made


def _by_parameter(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Tensors by the parameter that they are, or are the state of."""
    found: dict[str, dict[str, T]] = {}
    for key, value in tensors.items():
        found.setdefault(key.partition("/")[0], {})[key] = value
    return found


def _fill(targets: dict[str, Tensor] | None, saved: Mapping[str, Stored], memory: Memory | None) -> None:
    if targets is not None:  # of a parameter that this rank holds
        fill_tensors(targets, saved, "former tensors", memory=memory)


def _own(layout: Layout, key: str, whole: Stored) -> Stored:
    """This rank's piece of what is had whole."""
    tensor = torch.cat(list(whole.pieces())).view(whole.shape)
    return Stored.of(layout.piece(key, whole.shape).take(tensor))


class _Coming:
    """What this rank needs of the former model's tensors: there from when it is asked for until it is used."""

    def __init__(
        self,
        routes: Routes,
        layout: Layout,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        fetched: Fetched,
    ) -> None:
        self._routes, self._device, self._had, self._fetched = routes, layout.device, {**weights, **state}, fetched
        self._here: dict[str, Tensor] = {}
        self._dtypes = {name: parameter.dtype for name, parameter in layout.whole.named_parameters()}
        self._dtypes |= layout.dtypes(state, routes.travels)
        self._shapes = {**layout.shapes, **layout.whole_shapes(state, routes.travels)}
        stored = {key: self._stored(key) for key in sorted(self._shapes)}
        self.weights = {key: each for key, each in stored.items() if "/" not in key}
        self.state = {key: each for key, each in stored.items() if "/" in key}

    def _stored(self, key: str) -> Stored:
        shape = shape_of(self._routes.part(key, self._shapes[key]))
        return Stored(self._dtypes[key], shape, partial(self._pieces, key))

    def _pieces(self, key: str) -> Iterator[Tensor]:
        yield from self._here[key].reshape(-1).split(files.PIECE)

    @contextmanager
    def here(self, keys: Sequence[str]) -> Iterator[None]:
        """Have these here, as far as this rank needs them. Every rank must ask, for the same, in the same order."""
        for key in keys:
            route = self._routes.of(key, self._shapes[key])
            local = local_of(self._fetched(key, self._had[key])).detach() if route.needs else None
            if (found := route.carry(local, self._dtypes[key], self._device)) is not None:
                self._here[key] = found
        yield
        for key in keys:
            self._here.pop(key, None)
