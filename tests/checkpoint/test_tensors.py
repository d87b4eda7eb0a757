"""Safetensors files in pieces, read and written beside the format's own library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenfold.checkpoint import tensors
from tenfold.checkpoint.tensors import Stored, open_tensors, write_tensors
from tenfold.errors import TenfoldError


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PIECE", 7)


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(5, 9, generator=generator),
        "a/exp_avg": torch.randn(3, 2, 4, generator=generator).double(),
        "step": torch.tensor(7.0),
        "half": torch.randn(15, generator=generator).bfloat16(),
        "ids": torch.arange(30).view(5, 6),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "é": torch.ones(1, dtype=torch.uint8),
    }


def write(path: Path, given: dict[str, torch.Tensor]) -> dict[str, object]:
    return write_tensors(path, {name: Stored.of(tensor) for name, tensor in given.items()}, lambda _: None)


def joined(stored: Stored) -> torch.Tensor:
    pieces = list(stored.pieces())
    assert all(len(piece) == 7 for piece in pieces[:-1])
    return torch.cat([torch.empty(0, dtype=stored.dtype), *pieces]).view(stored.shape)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_is_written_in_pieces_is_read_by_the_library(tmp_path: Path) -> None:
    told = write(tmp_path / "x.safetensors", example())
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == example().keys()
    assert all(same(found[name], tensor) for name, tensor in example().items())
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert told == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def test_what_the_library_writes_is_read_in_pieces(tmp_path: Path) -> None:
    given = {name: tensor.contiguous() for name, tensor in example().items()}
    save_file(given, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = open_tensors(tmp_path / "x.safetensors")
    assert found.keys() == given.keys()
    assert all(same(joined(found[name]), tensor) for name, tensor in given.items())


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", example())
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for name, told in json.loads(raw[8 : 8 + length]).items():
        assert told["data_offsets"][0] % example()[name].element_size() == 0


def test_a_file_copied_in_pieces_is_the_same_file(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", example())
    advanced: list[int] = []
    write_tensors(tmp_path / "y.safetensors", open_tensors(tmp_path / "x.safetensors"), advanced.append)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    assert sum(advanced) == sum(stored.bytes for stored in open_tensors(tmp_path / "x.safetensors").values())


def header(text: str, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + rest


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 40,
        header("[1]"),
        header('{"a": 1}'),
        header('{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', b"1234"),
        header('{"a":{"dtype":"F32","shape":["x"],"data_offsets":[0,4]}}', b"1234"),
        header('{"a":{"dtype":"F32"}}', b"1234"),
    ],
)
def test_what_is_no_such_file_is_told_with_its_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(TenfoldError, match=r"x\.safetensors is damaged"):
        open_tensors(tmp_path / "x.safetensors")


def test_a_file_that_ends_while_it_is_read_is_told_with_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"w": torch.ones(100)})
    stored = open_tensors(path)["w"]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TenfoldError, match=r"x\.safetensors is damaged: it ends in w"):
        list(stored.pieces())


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match=r"x\.safetensors is missing"):
        open_tensors(tmp_path / "x.safetensors")
