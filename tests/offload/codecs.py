"""Formats of optimizer state, by definition: number by number in Python, or every code tried in NumPy."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

BLOCK = 256


def bf16(source: Tensor, name: str, first: int = 0) -> Tensor:
    """What is kept of numbers in bf16, back in fp32: sixteen random bits are added to the lower half, which is cut."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    factor, offset = struct.unpack("<II", digest)
    factor |= 1
    found = []
    for place, number in enumerate(source.view(-1).tolist(), start=first):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits += ((factor * place + offset) % 2**32) >> 16
        found.append(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])
    return torch.tensor(found).view(source.shape)


def numbers(signed: bool) -> np.ndarray:
    """The map of bitsandbytes' `create_dynamic_map`."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        found += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(found, dtype=np.float32))


def int8(source: Tensor, signed: bool) -> Tensor:
    """What is kept of numbers in 8 bits, back in fp32."""
    flat, codes = source.reshape(-1).numpy(), numbers(signed)
    found = np.empty_like(flat)
    for begin in range(0, len(flat), BLOCK):
        block = flat[begin : begin + BLOCK]
        scale = block[np.abs(block).argmax()]
        if abs(scale) < 2.0**-100:
            found[begin : begin + BLOCK] = 0
            continue
        ratios = block / scale
        nearest = np.abs(ratios[:, None].astype(np.float64) - codes).argmin(1)
        if not signed:
            nearest = np.where(block > 0, np.maximum(nearest, 1), 0)
        found[begin : begin + BLOCK] = codes[nearest] * scale
    return torch.from_numpy(found).view(source.shape)
