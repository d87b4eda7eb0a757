"""CO2 of energy, by stated factors alone."""

from __future__ import annotations

import json
import socket
import sys
from importlib.resources import files

import pytest

from tenfold.config.run import EnergyConfig
from tenfold.errors import TenfoldError
from tenfold.hardware.carbon import grid_of


def test_a_kwh_is_the_stated_grams_times_the_overhead_of_the_site() -> None:
    grid = grid_of(EnergyConfig(carbon_intensity=380.0, pue=1.5))
    assert grid is not None
    assert grid.co2_kg(3.6e6) == pytest.approx(0.380 * 1.5)


def test_without_a_factor_no_co2_is_claimed() -> None:
    assert grid_of(EnergyConfig(watts=100.0)) is None


def test_a_country_has_the_factor_of_codecarbons_table_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("codecarbon", reason="the extra `carbon` is not installed")

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    table = json.loads(files("codecarbon").joinpath("data/private_infra/global_energy_mix.json").read_text())
    grid = grid_of(EnergyConfig(country="fra"))
    assert grid is not None
    assert grid.grams_per_kwh == table["FRA"]["carbon_intensity"]
    assert "France" in grid.stated_by
    with pytest.raises(TenfoldError, match=r'energy.country = "XYZ".*three-letter'):
        grid_of(EnergyConfig(country="XYZ"))


def test_a_country_without_codecarbon_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    monkeypatch.setitem(sys.modules, "codecarbon.input", None)
    with pytest.raises(TenfoldError, match=r"tenfold\[carbon\]"):
        grid_of(EnergyConfig(country="DEU"))
