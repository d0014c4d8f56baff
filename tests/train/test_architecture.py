"""What a config contradicts of the model that parameters were trained in, although all arrays have the same shapes."""

import dataclasses

import pytest

from scalejax.configs import as_data
from scalejax.models.graph.gat import GatConfig
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import LlamaConfig, RopeScaling
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.models.vision.resnet import ResNetConfig
from scalejax.models.vision.unet import UNetConfig
from scalejax.train import architecture

LLAMA = LlamaConfig(layers=2, dim=32, ffn_dim=64, heads=4, kv_heads=2)
RESNET = ResNetConfig(stem="cifar", block="basic", depths=(1,), widths=(4,))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {"rope_theta": 10_000.0}),
        (LLAMA, {"rope_scaling": RopeScaling()}),
        (LLAMA, {"norm_eps": 1e-6}),
        (LLAMA, {"window": 16}),
        (LLAMA, {"tie_embeddings": True}),
        (LLAMA, {"heads": 2, "head_dim": 16}),
        (LLAMA, {"mlp": Experts()}),
        (WukongConfig(), {"activation": "gelu"}),
        (WukongConfig(), {"normalization": "none"}),
        (DcnV2Config(), {"pooling": "mean"}),
        (LogisticConfig(), {"pooling": "mean"}),
        (UNetConfig(), {"norm": "group"}),
        (GatConfig(), {"slope": 0.1}),
        (RESNET, {"shortcut": "padding"}),
    ],
)
def test_fields_of_the_function_are_compared_with_configs_and_with_their_records(config, changes):
    there = dataclasses.replace(config, **changes)
    for other in (there, as_data.to_data(there)):
        found = {one.path for one in architecture.differences(config, other)}
        assert found == {f"model.{name}" for name in changes}
    assert not list(architecture.differences(config, as_data.to_data(config)))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {"remat": "none", "unroll": 2, "attention": "reference", "loss_positions": 8}),
        (dataclasses.replace(LLAMA, mlp=Experts()), {"mlp": Experts(router=TopK(balance=0.5, z=1e-3))}),
        (WukongConfig(), {"dropout": 0.5, "embedding_scale": 0.1}),
        (GatConfig(), {"dropout": 0.1}),
    ],
)
def test_how_a_model_is_trained_and_computed_may_differ(config, changes):
    assert not list(architecture.differences(config, as_data.to_data(dataclasses.replace(config, **changes))))


def test_a_field_that_a_record_is_older_than_counts_as_its_default():
    record = as_data.to_data(LLAMA)
    del record["fields"]["window"]
    assert not list(architecture.differences(LLAMA, record))
    (found,) = architecture.differences(dataclasses.replace(LLAMA, window=8), record)
    assert str(found) == "model.window is None there and 8 here"


def test_what_a_surgery_makes_anew_is_not_compared():
    there = dataclasses.replace(WukongConfig(), head_hidden=(8,), activation="gelu")
    (found,) = architecture.differences(WukongConfig(), there, remade=("hidden",))
    assert found.path == "model.activation"


@pytest.mark.parametrize(
    ("step", "theta", "window"), [(1, 10_000.0, None), (10, 10_000.0, None), (11, 5.0, None), (16, 5.0, 4)]
)
def test_a_record_says_the_model_of_every_phase(step, theta, window):
    model = dataclasses.replace(LLAMA, rope_theta=10_000.0)
    phases = [("a", 5, {"model.rope_theta": 5.0, "seed": 3}), ("b", 5, {"model.window": 4})]
    record = {
        "experiment": {
            "type": "scalejax.train.experiment.Experiment",
            "fields": {
                "model": as_data.to_data(model),
                "steps": 10,
                "phases": [
                    {
                        "type": "scalejax.train.experiment.Phase",
                        "fields": {"name": name, "steps": steps, "changes": {"type": "dict", "fields": changes}},
                    }
                    for name, steps, changes in phases
                ],
            },
        }
    }
    expected = dataclasses.replace(model, rope_theta=theta, window=window)
    assert not list(architecture.differences(expected, architecture.of_run(record, step)))
    record["experiment"]["fields"]["phases"][0]["fields"]["changes"]["fields"] = {
        "model": {"type": "scalejax.surgery.alternation.HiddenShare", "fields": {"share": 0.5, "multiple": 1}}
    }
    if step > 10:
        assert architecture.of_run(record, step) is None
