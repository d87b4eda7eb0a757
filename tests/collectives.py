"""The counter of collectives, by its former name."""

from tenfold.parallel.traffic import Collectives

__all__ = ["Collectives"]
