"""Tables, frozen parameters and scaled losses beside gradients and weights that travel compressed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import small_run

from scalejax import optim
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.parallel.compression.compressors import Identity, OneBit
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.train.experiment import Precision
from scalejax.train.runs.run import Run

HOSTS = MeshShape(replica=2, fsdp=4)
MODEL = DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16, 8))
SDP4BIT = Sdp4Bit(weight_group=32, param_dtype=None)


def two_way(compressor):
    return Ddp(compression=Compression(compressor=compressor, plain_below=0))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def bound(rows, strategy, **changes):
    settings = {
        "model": MODEL,
        "strategy": strategy,
        "placement__mesh": HOSTS,
        "optimizer": optim.Sgd(learning_rate=optim.Constant(value=0.1)),
        **changes,
    }
    experiment = small_run.experiment(rows, **settings)
    return Run.bind(experiment, experiment.data.build(), make_mesh(experiment.placement.mesh))


def stepped(run, steps):
    """The states before the first step and after each, as they are stored."""
    held = lambda state: jax.tree.map(np.asarray, {**run.to_stored(state), "key": None})  # noqa: E731
    state, host = run.begin()
    found = [held(state)]
    with run.feed(host, steps) as feed:
        for _ in range(steps):
            feed.take()
            state, _ = feed.step(state)
            found.append(held(state))
    return found


ONEBIT = two_way(OneBit())
BOTH = pytest.mark.parametrize("strategy", [ONEBIT, SDP4BIT], ids=["onebit", "sdp4bit"])


@pytest.fixture(scope="module")
def trained(rows):
    """States of runs of three steps in which all but the last MLP is frozen, by strategy."""
    return functools.cache(lambda strategy: stepped(bound(rows, strategy, trainable="top/.*"), 3))


@pytest.mark.slow
@BOTH
def test_frozen_parameters_stay_as_they_were_and_whole(rows, trained, strategy):
    first, *after = trained(strategy)
    specs = bound(rows, strategy, trainable="top/.*").program.specs
    for path, value in after[-1]["params"].items():
        moves = path.startswith("top/")
        assert (value != first["params"][path]).any() == moves, path
        assert moves or not any(specs[path])  # nothing to gather
    assert differ(first["tables"], after[-1]["tables"])


def differ(one, other):
    return any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


@pytest.mark.slow
@BOTH
def test_rows_get_the_update_of_a_plain_run_whatever_the_dense_part_lost(trained, strategy):
    """Their gradients go to their tables by themselves; in the first step all runs compute with the same weights."""
    plain, found = trained(Ddp(accumulate="local")), trained(strategy)
    for step in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, found[step]["tables"], plain[step]["tables"])
    assert differ(found[0]["tables"], found[1]["tables"])
    assert differ(found[1]["params"], plain[1]["params"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "plain"),
    [
        (two_way(Identity()), Ddp(accumulate="local")),
        (
            dataclasses.replace(SDP4BIT, weights="plain", fast_bits=32, slow_bits=32),
            Fsdp(sharding="SHARD_GRAD_OP", form="explicit", accumulate="local"),
        ),
    ],
    ids=["identity", "sdp4bit in 32 bits"],
)
def test_without_rounding_tables_and_parameters_are_those_of_a_plain_run(rows, strategy, plain):
    """But for the order of sums."""
    found, wanted = (stepped(bound(rows, one), 4)[-1] for one in (strategy, plain))
    for part in ("params", "tables"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[part], wanted[part])


def on_each_device(tree):
    """Bits of all copies and shards, of all devices."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


@pytest.mark.slow
@BOTH
def test_steps_that_overflow_leave_the_exchange_as_it_was_on_every_device(rows, strategy):
    """The factor on a float16 loss doubles in every step, beyond what float16 holds, and is halved after that."""
    run = bound(
        rows,
        strategy,
        gradients__loss_scaling=LossScaling(initial=2.0**12, interval=1),
        precision=Precision(compute="float16"),
    )
    state, host = run.begin()
    skipped, kept, moved = 0, 0, 0
    with run.feed(host, 24) as feed:
        for _ in range(24):
            feed.take()
            before, scale = jax.tree.map(jax.numpy.copy, state.exchange), float(state.loss_scale.scale)
            params = on_each_device(state.params)
            state, _ = feed.step(state)
            changed_params = on_each_device(state.params) != params
            if int(state.loss_scale.skipped) > skipped:
                skipped += 1
                assert float(state.loss_scale.scale) == scale / 2
                if strategy is ONEBIT:  # residuals are in units of the scaled loss
                    halve = lambda x: x / 2 if x.dtype == np.float32 else x  # noqa: E731
                    before = jax.tree.map(halve, before)
                assert on_each_device(state.exchange) == on_each_device(before)
                assert not changed_params
                kept += any(np.asarray(leaf).any() for leaf in jax.tree.leaves(before))
            else:
                assert changed_params
                moved += on_each_device(state.exchange) != on_each_device(before)
    assert skipped > 3
    assert kept == skipped
    assert moved == 24 - skipped
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves((state.exchange, state.params)))
