"""What it takes to come from one stage to the next: layers that shared get copies of their own, where they are to lie.

On one rank without offload they are copied in place. Else (`training.relayout`) each rank makes its pieces of the new
model from the pieces of the former one that it needs. What it has not it gets from others, on its host; what was below
the device is read, and what is to be there is written. Where only the sharing changes it has them all, and nothing is
exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tenfold.config.run import RunConfig
from tenfold.offload.tiers import KINDS, TierName
from tenfold.parallel.routes import Routes
from tenfold.parallel.splits import MEANS, state_shape
from tenfold.planning.cluster import Cluster
from tenfold.planning.holdings import Holdings
from tenfold.planning.plans import Delinking
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate, Collective, Operation
from tenfold.sharing.lineage import Lineage

if TYPE_CHECKING:
    from tenfold.planning.evaluating import Found


def delinking(
    config: RunConfig, cluster: Cluster, before: Stage, former: Found, after: Stage, following: Found
) -> Delinking:
    """From a stage that ran as `former` to one that runs as `following`."""
    degrees = following.candidate.degrees
    had, most = _most_by_tier(former), _most_by_tier(following)
    away = any(each[tier] for each in (had, most) for tier in ("host", "disk"))
    received = received_bytes(config, before, former.candidate, after, following.candidate)
    rates = cluster.rates(degrees)
    down, up = rates.write.get("host"), rates.read.get("host")
    moved: dict[str, int] = {"exchange": received, "disk": had["disk"] + most["disk"]}
    shares: dict[str, float] = {}
    if received:
        exchange = Collective("delinking", "send", "world", float(received))
        shares["exchange"] = cluster.exchange_seconds(exchange, degrees)
    if received and down and up:  # what was exchanged is on the host
        moved["host"] = received + most["device"] + had["host"] + most["host"]
        shares["host"] = (received + most["host"]) / down + (most["device"] + had["host"]) / up
    else:
        moved["copying"] = most["device"] + (had["host"] + most["host"] if not (down and up) else 0)
        shares["copying"] = cluster.seconds(Operation("add", "memory", bytes=2.0 * moved["copying"]), "fp32")
        if away and down and up:
            moved["host"] = had["host"] + most["host"]
            shares["host"] = had["host"] / up + most["host"] / down
    if had["disk"] or most["disk"]:
        shares["disk"] = had["disk"] / rates.read["disk"] + most["disk"] / rates.write["disk"]
    seconds = sum(shares.values())
    accelerator = cluster.accelerator
    joules = cluster.ranks * seconds * min(accelerator.idle_watts, accelerator.watts) if accelerator.watts else None
    price = accelerator.price_per_hour
    cost = None if price is None else cluster.ranks * seconds / 3600 * price
    return Delinking(seconds, shares, {what: size for what, size in moved.items() if size}, joules, cost)


def _most_by_tier(found: Found) -> dict[TierName, int]:
    """Bytes of weights and moments in each tier, of the rank that has most there: gradients and activations begin with
    the first step."""
    held: list[dict[TierName, int]] = []
    for memory, placement in zip(found.memory, found.placements, strict=True):
        mine: dict[TierName, int] = {"device": 0, "host": 0, "disk": 0}
        for part in memory.parts:
            for kind in KINDS:
                if kind in ("weights", "moments"):
                    mine[placement.tier(part.name, kind)] += part.bytes.get(kind, 0)
        held.append(mine)
    return {tier: max(each[tier] for each in held) for tier in held[0]}


def received_bytes(config: RunConfig, before: Stage, former: Candidate, after: Stage, following: Candidate) -> int:
    """Bytes of weights and moments, fp32, that a rank gets from others: that one of the first and the last rank of each
    pipeline rank which gets most."""
    lying, to_lie = Holdings(config, before.sharing, former), Holdings(config, after.sharing, following)
    optimizer = config.optim.name
    known, key = lying.whole.received, (lying.cut, lying.degrees, after.sharing, to_lie.cut, to_lie.degrees, optimizer)
    if key not in known:
        lineage = Lineage(lying.whole.decoder, before.sharing, after.sharing)
        each = following.degrees.ranks // following.degrees.pipeline
        ranks = {place + end for place in range(0, following.degrees.ranks, each) for end in (0, each - 1)}
        known[key] = max(
            _received(Routes(lying, to_lie, lineage, rank), lying.whole.trained, optimizer) for rank in ranks
        )
    return known[key]


def _received(routes: Routes, trained: Mapping[str, bool], optimizer: str) -> int:
    if not routes.travels:
        return 0
    found = 0
    for name in (*routes.become, *routes.folded):
        shape, carried = routes.before.shapes[name], trained[name] and name in routes.become
        means = [f"{name}/{kind}" for kind in MEANS if carried and optimizer == "adafactor" and len(shape) > 1]
        alike = {"adamw": 2, "muon": 1, "adafactor": 0 if means else 1}[optimizer] if carried else 0
        found += (1 + alike) * routes.lacks(name, shape)
        found += sum(routes.lacks(key, state_shape(key, shape)) for key in means)
    return 4 * found
