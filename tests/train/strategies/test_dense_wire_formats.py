"""A language model whose parameters and gradients travel in block formats."""

import dataclasses

import jax
import numpy as np
import pytest
import small_language_run as small

from scalejax import configs
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def trained(texts, shape, steps=10, **formats):
    experiment = small.experiment(texts, strategy=Fsdp(form="explicit", **formats))
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, batch_size=16))
    data = experiment.data.build()
    run = Run(binding.bind(experiment, data.schema, make_mesh(shape)), data)
    state, host = run.begin()
    losses = []
    with run.feed(host, steps) as feed:
        for _ in range(steps):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
    return np.array(losses), jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
def test_nine_bits_follow_float32_and_four_less_closely(texts):
    shape = MeshShape(fsdp=4, stage=2)
    exact, _ = trained(texts, shape)
    nine, params = trained(texts, shape, gather_format="bdr_mx9", reduce_format="bdr_mx9")
    four, _ = trained(texts, shape, gather_format="bdr_mx4", reduce_format="bdr_mx4")
    assert exact[-1] < 0.95 * exact[0]
    off = {name: np.abs(losses - exact).max() for name, losses in (("nine", nine), ("four", four))}
    assert 0 < off["nine"] < 0.01  # of losses near 3
    assert 2 * off["nine"] < off["four"] < 0.3
    for path, p in params.items():  # what rests on a device is no number of few bits
        assert p.dtype == np.float32
        assert (p.view(np.uint32) & 0xFFFF != 0).any(), path


def test_a_recipe_names_formats_on_the_command_line():
    sets = ["strategy.gather_format=mxfp8_e4m3", "strategy.reduce_format=bdr_mx9"]
    strategy = configs.load("llama-smoke", sets).strategy
    assert strategy == Fsdp(
        form="explicit", reduce_dtype="float32", gather_format="mxfp8_e4m3", reduce_format="bdr_mx9"
    )
    assert configs.load("wukong-smoke", ["tables.exchange.forward=bdr_mx6"]).tables.exchange.forward == "bdr_mx6"
