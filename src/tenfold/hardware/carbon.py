"""Carbon dioxide of the energy used, by a factor that somebody stated: no network is asked."""

from __future__ import annotations

from dataclasses import dataclass

from tenfold.config.run import EnergyConfig
from tenfold.errors import TenfoldError

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Grid:
    """Grams of CO2 for a kWh at the site's meter, of which the machine draws 1 / `pue`, and who says so."""

    grams_per_kwh: float
    pue: float
    stated_by: str

    def co2_kg(self, joules: float) -> float:
        """Kilograms of CO2 for `joules` drawn by the machine."""
        return joules / _JOULES_PER_KWH * self.pue * self.grams_per_kwh / 1e3


def grid_of(config: EnergyConfig) -> Grid | None:
    """The grid of a run file: its own factor, or that of its country by codecarbon's table; None where it names none.

    Raises TenfoldError for a country that codecarbon does not know, or when it is not installed.
    """
    if config.carbon_intensity is not None:
        return Grid(config.carbon_intensity, config.pue, "energy.carbon_intensity")
    if config.country is None:
        return None
    try:
        from codecarbon.input import DataSource  # its table alone: its trackers would ask the network
    except ImportError:
        raise TenfoldError(
            f'energy.country = "{config.country}" needs codecarbon, which is not installed: '
            "pip install 'tenfold[carbon]', or state energy.carbon_intensity"
        ) from None
    countries = DataSource().get_global_energy_mix_data()
    known = countries.get(config.country.upper())
    if known is None:
        raise TenfoldError(
            f'energy.country = "{config.country}" is none of the {len(countries)} countries that codecarbon knows; '
            'write its three-letter ISO code, for example "DEU", or state energy.carbon_intensity'
        )
    stated_by = f"codecarbon's mean for {known['country_name']}, {known['year']}"
    return Grid(float(known["carbon_intensity"]), config.pue, stated_by)
