"""Quantized arrays as bytes: what was packed comes back, and every byte is where the layout says."""

import dataclasses

import format_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_cases import assert_equal_bits as equal

from scalejax.errors import UserError
from scalejax.numerics.formats import FORMATS, bdr
from scalejax.numerics.packing import (
    block_bytes,
    pack,
    pack_bits,
    pack_blocks,
    unpack,
    unpack_bits,
    unpack_blocks,
)
from scalejax.numerics.quantize import quantize

pytestmark = pytest.mark.usefixtures("strict_promotion")

BYTES = {
    "bdr_mx9": 1.125,
    "bdr_mx6": 0.75,
    "bdr_mx4": 0.5,
    "mxfp8_e4m3": 33 / 32,
    "mxfp8_e5m2": 33 / 32,
    "mxfp6_e2m3": 25 / 32,
    "mxfp6_e3m2": 25 / 32,
    "mxfp4_e2m1": 17 / 32,
    "mxint8": 33 / 32,
    "nvfp4": 9 / 16,
    "msfp16": 17 / 16,
    "msfp12": 9 / 16,
}


def numbers(format, *shape):
    return jnp.asarray(np.random.default_rng(3).standard_normal((*shape, 4 * format.k1)), jnp.float32)


@pytest.mark.default_cases("1", "3", "5", "8", "11")
@pytest.mark.parametrize("bits", range(1, 17))
def test_a_stream_of_bits_begins_in_the_lowest_bits_of_its_first_byte(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 24, 2))
    packed = np.asarray(pack_bits(jnp.asarray(codes, jnp.uint16), bits, axis=1))
    assert packed.shape == (3, 3 * bits, 2)
    for i in range(3):
        for j in range(2):
            stream = sum(int(c) << (bits * k) for k, c in enumerate(codes[i, :, j]))
            assert packed[i, :, j].tobytes() == stream.to_bytes(3 * bits, "little")
    np.testing.assert_array_equal(np.asarray(unpack_bits(jnp.asarray(packed), bits, axis=1)), codes)


def test_layouts_as_documented():
    codes = jnp.array([0b100001, 0b110011, 0b101010, 0b011110], jnp.uint8)
    assert [int(b) for b in pack_bits(codes, 6, axis=0)] == [0b11_100001, 0b1010_1100, 0b011110_10]
    assert [int(b) for b in pack_bits(jnp.array([0x3, 0xC], jnp.uint8), 4, axis=0)] == [0xC3]
    assert [int(b) for b in pack_bits(jnp.array([1, 2, 3, 0], jnp.uint8), 2, axis=0)] == [0b00_11_10_01]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_gives_what_was_packed(name):
    format = format_cases.small(name)
    quantized = quantize(numbers(format, 3), format, axis=-1)
    packed = jax.jit(pack)(quantized)
    equal(unpack(packed), quantized)
    assert packed.nbytes == int(3 * 4 * format.k1 * format.bits_per_element) // 8 + (4 if name == "nvfp4" else 0)


@pytest.mark.default_cases("bdr_mx9*", "bdr_mx4*", "mxfp6_e2m3*")
@pytest.mark.parametrize(("name", "bytes_per_element"), BYTES.items())
def test_blocks_come_back_from_their_bytes(name, bytes_per_element):
    format = FORMATS[name]
    x = numbers(format, 5)[:, : 4 * format.k1 - 3]
    quantized = quantize(x, name, axis=1, tail="pad")
    data = pack_blocks(quantized)
    assert data.shape == (5, 4 * block_bytes(name))
    assert data.size == bytes_per_element * quantized.codes.size
    assert data.size * 8 == format.bits_per_element * quantized.codes.size
    equal(
        unpack_blocks(data, name, axis=1, length=x.shape[1], tensor_scale=quantized.tensor_scale),
        quantized,
    )


def test_any_axis_packs_in_place():
    x = jnp.moveaxis(numbers(FORMATS["bdr_mx6"], 2, 3), -1, 1)
    quantized = quantize(x, "bdr_mx6", axis=1)
    data = pack_blocks(quantized)
    assert data.shape == (2, 48, 3)
    last = pack_blocks(quantize(jnp.moveaxis(x, 1, -1), "bdr_mx6", axis=-1))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(last), -1, 1), np.asarray(data))
    equal(unpack_blocks(data, "bdr_mx6", axis=1, length=64), quantized)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "m"), [("bdr_mx9", 18, 7), ("bdr_mx6", 12, 4), ("bdr_mx4", 8, 2)])
def test_the_bytes_of_an_isca_block(name, size, m):
    x = np.zeros(16, np.float32)
    x[0], x[1], x[4], x[5] = 8.0, -4.0, -2.0, 1.0  # exponent 3; pair 0 has it, all others are demoted
    data = [int(b) for b in pack_blocks(quantize(jnp.asarray(x), name, axis=0))]
    assert len(data) == size
    assert data[:2] == [127 + 3, 0b11111110]
    stream = int.from_bytes(bytes(data[2:]), "little")
    codes = [(stream >> (i * (m + 1))) & ((1 << (m + 1)) - 1) for i in range(16)]
    # Steps of 2^(3 - (m - 1)) in pair 0, of half that in pair 2.
    step = 2.0 ** (3 - (m - 1))
    expected = [0] * 16
    expected[0], expected[1] = int(8 / step), int(4 / step) | 1 << m
    expected[4], expected[5] = int(2 / (step / 2)) | 1 << m, round(1 / (step / 2))
    assert codes == expected


def test_codes_that_do_not_fill_bytes_are_refused():
    with pytest.raises(UserError, match="codes of 3 bits fill whole bytes in groups of 8; got 12"):
        pack_bits(jnp.zeros(12, jnp.uint8), 3, axis=0)
    with pytest.raises(UserError, match="4 codes of 6 bits take 3 bytes; got 4 bytes"):
        unpack_bits(jnp.zeros(4, jnp.uint8), 6, axis=0)
    with pytest.raises(UserError, match="bits: codes have 1 to 16 bits; got 17"):
        pack_bits(jnp.zeros(12, jnp.uint8), 17, axis=0)
    odd = bdr(k1=4, k2=2, m=7)
    with pytest.raises(UserError, match=r"2 times 1 bits .* do not fill whole bytes"):
        pack_blocks(quantize(jnp.zeros(16), odd, axis=0))


def test_negative_codes_are_packed_in_two_s_complement_and_spare_their_neighbours():
    assert [int(b) for b in pack_bits(jnp.asarray([-1, 0, 3, -2], jnp.int8), 4, axis=0)] == [0x0F, 0xE3]


def test_what_is_no_stream_of_bits_is_refused():
    with pytest.raises(UserError, match="pack_bits: codes must be integers; got float32"):
        pack_bits(jnp.zeros(4), 4, axis=0)
    with pytest.raises(UserError, match="unpack_bits: bytes must be uint8; got int8"):
        unpack_bits(jnp.zeros(3, jnp.int8), 6, axis=0)
    for call in (pack_bits, unpack_bits):
        with pytest.raises(UserError, match=f"{call.__name__}: the array has 1 axes; got axis 1"):
            call(jnp.zeros(4, jnp.uint8), 4, axis=1)


def test_float32_scales_stay_apart():
    with pytest.raises(UserError, match=r"int8 has float32 scales, which do not fit a byte. Use pack"):
        block_bytes("int8")


def test_bytes_of_another_format_are_refused():
    data = pack_blocks(quantize(jnp.zeros(64), "bdr_mx9", axis=0))
    with pytest.raises(
        UserError, match=r"64 entries of bdr_mx6 take 4 blocks of 12 bytes; got uint8.72..*another format"
    ):
        unpack_blocks(data, "bdr_mx6", axis=0, length=64)
    with pytest.raises(UserError, match="nvfp4 has one, which pack_blocks leaves out"):
        unpack_blocks(jnp.zeros(36, jnp.uint8), "nvfp4", axis=0, length=64)
    with pytest.raises(UserError, match="tensor_scale: bdr_mx9 has none"):
        unpack_blocks(data, "bdr_mx9", axis=0, length=64, tensor_scale=jnp.float32(1))


def test_wide_elements_take_two_bytes_apart_and_none_too_many_packed():
    format = dataclasses.replace(bdr(m=9), k1=16)
    quantized = quantize(numbers(format), format, axis=0)
    assert quantized.codes.dtype == jnp.uint16
    equal(unpack(pack(quantized)), quantized)
    assert pack(quantized).codes.size == 64 * 10 // 8
