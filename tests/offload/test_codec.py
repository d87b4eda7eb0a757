"""Formats of optimizer state against their definitions."""

import pytest
import torch

from offload import codecs
from tenfold.offload.codec import AsItIs, BFloat16, Int8, Noise, bytes_of, codec_of, dynamic_map

CODECS = {"fp32": AsItIs(torch.float32), "bf16": BFloat16(), "int8": Int8(True), "int8 squares": Int8(False)}


def coded(codec, source, name="", first=0):
    kept = torch.full((codec.size(len(source)),), 99, dtype=torch.uint8)
    codec.encode(source, kept, Noise.of(name, first))
    return kept


def decoded(codec, kept, count):
    into = torch.full((count,), torch.nan)
    codec.decode(kept, into)
    return into


def sample(count, signed=True, seed=0):
    """Numbers of many magnitudes, with zeros, blocks of zeros and of next to nothing, and a block of equal ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 10 ** (4 * torch.randn(count, generator=generator))
    x[::7] = 0.0
    if count > 2000:
        x[256:512], x[512:768] = 0.0, 1e-38 * x[512:768].clamp(-1, 1)
        x[1024:1280] = -0.03
    return x if signed else x.abs()


@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_bf16_is_its_definition_to_the_last_bit(count):
    x = sample(count)
    got = decoded(BFloat16(), coded(BFloat16(), x, "3/layers.0/exp_avg", 2**33 + 5), count)
    assert torch.equal(got, codecs.bf16(x, "3/layers.0/exp_avg", 2**33 + 5))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000, 2**16 + 300])
@pytest.mark.parametrize("signed", [True, False])
def test_int8_is_the_nearest_of_all_codes(count, signed):
    x = sample(count, signed)
    codec = Int8(signed)
    assert torch.equal(decoded(codec, coded(codec, x), count), codecs.int8(x, signed))


def test_the_map_is_that_of_the_8_bit_optimizers():
    assert dynamic_map(True)[:3] == pytest.approx([-0.99296875, -0.97890625, -0.96484375])  # as bitsandbytes lists them
    for signed in (True, False):
        assert dynamic_map(signed) == pytest.approx(codecs.numbers(signed).tolist(), rel=1e-6)
        assert len(set(dynamic_map(signed))) == 256


@pytest.mark.parametrize("name", CODECS)
def test_what_was_decoded_encodes_to_the_same_bytes(name):
    codec = CODECS[name]
    for seed in range(5):
        x = sample(70_000, "squares" not in name, seed)
        kept = coded(codec, x, "before")
        again = coded(codec, decoded(codec, kept, len(x)), "after")
        assert torch.equal(kept, again)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, -0.37, 3e-29, 7.7e30])
def test_every_code_comes_back(signed, scale):
    x = torch.tensor(dynamic_map(signed)) * (scale if signed else abs(scale))
    codec = Int8(signed)
    kept = coded(codec, x)
    assert torch.equal(decoded(codec, kept, 256), x)
    assert len(kept[:256].unique()) == 256


@pytest.mark.parametrize("signed", [True, False])
def test_next_to_the_middle_of_two_codes_the_nearest_is_taken(signed):
    codes = torch.from_numpy(codecs.numbers(signed))
    middles = ((codes[1:].double() + codes[:-1].double()) / 2).float()
    below, above = (middles.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))
    for near in (below, middles, above):
        x = torch.cat([torch.ones(1), near])  # the scale is 1
        assert torch.equal(decoded(Int8(signed), coded(Int8(signed), x), 256), codecs.int8(x, signed))


def test_the_largest_number_of_a_block_is_kept_and_no_square_becomes_zero():
    x = sample(2560, signed=False, seed=3)
    for codec, source in ((Int8(True), -x), (Int8(False), x)):
        got, blocks = decoded(codec, coded(codec, source), 2560).view(-1, 256), source.view(-1, 256)
        kept = blocks.abs().amax(1) > 1e-30
        assert torch.equal(got.abs().amax(1)[kept], blocks.abs().amax(1)[kept])
    assert torch.equal((got == 0)[kept], (blocks == 0)[kept])


def test_an_average_that_decays_slowly_falls_in_bf16_as_it_should():
    x, steps = torch.full((4096,), 1.7e-3), 1000
    codec = BFloat16()
    for step in range(steps):
        x = decoded(codec, coded(codec, x * 0.999, f"{step}/exp_avg_sq"), len(x))
    wanted = 1.7e-3 * 0.999**steps
    assert x.mean().item() == pytest.approx(wanted, rel=5e-3)  # rounded to the nearest it would not have moved
    assert torch.tensor(1.7e-3).bfloat16() == (torch.tensor(1.7e-3).bfloat16().float() * 0.999).bfloat16()
    assert x.std().item() < 0.1 * wanted


def test_noise_is_even_in_every_step_and_over_steps():
    for bits in (
        Noise.of("5/layers.0.up/exp_avg", 0).bits(0, 2**16, torch.device("cpu")),
        torch.cat([Noise.of(f"{step}/x", 0).bits(77, 1, torch.device("cpu")) for step in range(4096)]),
    ):
        assert bits.min() >= 0
        assert bits.max() < 2**16
        counts = torch.bincount(bits // 2**12, minlength=16) / len(bits)
        assert (counts - 1 / 16).abs().max() < 0.02


def test_what_is_not_finite_stays_so():
    for codec in CODECS.values():
        for value in (torch.nan, torch.inf):
            x = sample(1000).abs()
            x[7] = value
            assert not decoded(codec, coded(codec, x), 1000).isfinite().all()
    x = torch.tensor([1.0, 2.0, 0.0]).view(torch.int32)
    x[2] = 2**31 - 1  # what a GPU gives for no number
    assert decoded(BFloat16(), coded(BFloat16(), x.view(torch.float32)), 3).isnan().any()


def test_few_elements_and_what_is_not_by_element_stay_as_they_are():
    large, small = torch.zeros(64, 64), torch.zeros(63, 64)
    assert isinstance(codec_of("int8", "exp_avg", small, small), AsItIs)
    assert isinstance(codec_of("int8", "row_var", torch.zeros(64, 1), large), AsItIs)
    assert isinstance(codec_of("bf16", "exp_avg", large.bfloat16(), large.bfloat16()), AsItIs)
    assert codec_of("int8", "exp_avg", large, large) == Int8(True)
    assert codec_of("int8", "exp_avg_sq", large, large) == Int8(False)


def test_bytes_of_a_number():
    assert [bytes_of("fp32"), bytes_of("bf16"), bytes_of("int8")] == [4, 2, 1 + 4 / 256]
