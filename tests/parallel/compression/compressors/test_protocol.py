"""What every compressor keeps: its bytes, the same for the same key, zeros, NaN, rows apart from each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressor_cases import EACH, KEY, back, encoded, heavy, key_of, many, off

from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import Blocks, LinearDithering, RandomKEntries

N = 157
"""No multiple of 8 or of a block, and more than a block of 128: one shape, compiled once."""
ALL = pytest.mark.parametrize("compressor", EACH.values(), ids=EACH)
DRAWING = {name: compressor for name, compressor in EACH.items() if compressor.traits.keys != "none"}
OF_ANY_SIZE = {
    name: compressor
    for name, compressor in EACH.items()
    if name not in ("fp16", "topk-float16", "randomk-unscaled", "onebit-none")
}


@pytest.mark.default_cases(first=15)
@ALL
@pytest.mark.parametrize("n", [30, 37, 1000])
def test_a_row_takes_the_bytes_it_says(compressor, n):
    payload = jax.eval_shape(compressor.encode, jax.ShapeDtypeStruct((3, n), jnp.float32), key_of(compressor))
    for array in payload.values():
        assert array.shape[0] == 3
    assert sum(a.size * a.dtype.itemsize for a in payload.values()) == 3 * compressor.payload_bytes(n)
    decoded = jax.eval_shape(lambda p, k: compressor.decode(p, n, k), payload, key_of(compressor))
    assert (decoded.shape, decoded.dtype) == ((3, n), jnp.float32)


@pytest.mark.default_cases(first=7)
@ALL
def test_rows_do_not_depend_on_each_other_and_zeros_stay_zeros(compressor):
    x = heavy(3, N)
    x[2] = 0
    together = np.asarray(back(compressor, x, key_of(compressor)))
    assert (together[2] == 0).all()
    x[1] = 5
    np.testing.assert_array_equal(back(compressor, x, key_of(compressor))[::2], together[::2])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_finite(compressor, value):
    x = heavy(3, N)
    x[1, 7] = value
    got = np.asarray(back(compressor, x, key_of(compressor)))
    assert np.isfinite(got[[0, 2]]).all()
    name = compressor.traits.name
    if name in ("identity", "fp16"):
        np.testing.assert_array_equal(got[1, 7], np.float32(value))
        assert np.isfinite(np.delete(got[1], 7)).all()
    elif isinstance(compressor, Blocks):
        block = 128 if compressor.format.endswith(":128") else 16
        assert np.isnan(got[1, :block]).all()
        assert np.isfinite(got[1, block:]).all()
    else:
        assert np.isnan(got[1]).all()


@pytest.mark.default_cases(first=8)
@ALL
def test_equal_keys_give_equal_payloads_and_others_others(compressor):
    x = heavy(3, N)
    first, again = (encoded(compressor, x, key_of(compressor)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    if compressor.traits.keys != "none":
        other = encoded(compressor, x, KEY + jnp.uint32(1))
        assert any(not np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", DRAWING.values(), ids=DRAWING)
def test_it_is_as_biased_as_it_says(compressor):
    x = heavy(2, 13)
    distance = off(many(compressor, x, 3000), x)
    assert (distance < 4) == (compressor.traits.mean == "unbiased"), distance


@pytest.mark.parametrize("exponent", [-100, 100])
@pytest.mark.parametrize("compressor", OF_ANY_SIZE.values(), ids=OF_ANY_SIZE)
def test_values_of_any_size_come_back_alike(compressor, exponent):
    x, factor = heavy(3, N), np.float32(2.0**exponent)
    scaled = np.asarray(back(compressor, x * factor, key_of(compressor)))
    np.testing.assert_allclose(scaled / factor, back(compressor, x, key_of(compressor)), rtol=1e-6)


@pytest.mark.slow
def test_rows_travel_between_devices_and_are_decoded_there():
    travelling = {name: EACH[name] for name in ("onebit", "topk", "randomk", "natural", "int4")}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = heavy(8, 8, N)  # device, row, value
    keys = jnp.stack([jnp.arange(8, dtype=jnp.uint32), jnp.zeros(8, jnp.uint32)], axis=1)

    def exchanged(x, key):
        found = {}
        for name, compressor in travelling.items():
            own = key[0] if compressor.traits.keys == "own" else key_of(compressor)
            sent = compressor.encode(x[0], own)
            arrived = jax.tree.map(lambda leaf: jax.lax.all_to_all(leaf, "data", 0, 0, tiled=True), sent)
            found[name] = compressor.decode(arrived, N, KEY)[None]
        return found

    spec = jax.sharding.PartitionSpec("data")
    run = jax.shard_map(exchanged, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    got = jax.jit(run)(x, keys)
    for name, compressor in travelling.items():
        own = keys[5] if compressor.traits.keys == "own" else key_of(compressor)
        expected = back(compressor, x[5], own)
        # Sums of a row may be in another order.
        np.testing.assert_allclose(np.asarray(got[name])[:, 5], expected, rtol=1e-6, err_msg=name)


@ALL
def test_what_it_cannot_take_is_refused(compressor):
    with pytest.raises(UserError, match=r"values must be float32\[rows, n\]; got float32\[8\]"):
        compressor.encode(jnp.ones(8), KEY)
    with pytest.raises(UserError, match=r"got bfloat16\[1, 8\]"):
        compressor.encode(jnp.ones((1, 8), jnp.bfloat16), KEY)
    with pytest.raises(UserError, match="a row must have 1 to 1073741824 values; got 0"):
        compressor.check(0)
    compressor.check(100)
    if compressor.traits.keys != "none":
        with pytest.raises(UserError, match=r"key must be uint32\[2\].*got none"):
            compressor.encode(jnp.ones((1, 8)))
        with pytest.raises(UserError, match=r"got key<fry>\[\]"):
            compressor.encode(jnp.ones((1, 8)), jax.random.key(0))


def test_messages_name_whose_key_is_wanted():
    with pytest.raises(UserError, match=r"random-k, k=5: key must be .*the same on all devices"):
        RandomKEntries(k=5).decode({"values": jnp.ones((1, 5))}, 8)
    with pytest.raises(UserError, match=r"linear dithering, 7 levels.*another one on every device"):
        LinearDithering(levels=7).encode(jnp.ones((1, 8)))
