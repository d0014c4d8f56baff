"""Models over towers against literal NumPy forms in float64, and against the flat models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from scalejax import nn
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.inference.recommendation import operators
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import (
    FactorizationMachine,
    FeatureCross,
    LayerInputs,
    LinearCompression,
    MlpExperts,
)
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.towers import DcnTower, DlrmTower, TowersConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.numerics.quantized import weights
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.towers import Partition
from scalejax.train.state import ModelShape

F64 = nn.Dtypes(jnp.float64, jnp.float64)
N, D = 4, 3
UNEQUAL = Partition(towers=(("c3", "c0"), ("c4", "c1", "c2")))
FM = FactorizationMachine(outputs=2, rank=2, hidden=(6,), normalization="none")
DLRM = DlrmConfig(dim=N, bottom_hidden=(6,), top_hidden=(7,))
DCN = DcnV2Config(dim=N, bottom_hidden=(6,), deep_hidden=(7,))
WUKONG = WukongConfig(
    dim=2, feature_vectors=2, fm_outputs=3, lcb_outputs=3, rank=2, fmb_hidden=(5,), head_hidden=(4,), bottom_hidden=(4,)
)
DHEN = DhenConfig(
    dim=N, layers=(EnsembleLayer(modules=(FeatureCross(outputs=3),)),), head_hidden=(4,), bottom_hidden=(4,)
)
MODULES = {
    "each": (DlrmTower(dim=D, each=2),),
    "mixed": (DlrmTower(dim=D, each=0, mixed=2),),
    "each and mixed": (DlrmTower(dim=D, each=1, mixed=2),),
    "cross": (DcnTower(dim=D),),
    "low-rank crosses": (DcnTower(dim=D, cross_layers=2, cross_rank=2),),
    "linear": (LinearCompression(outputs=2),),
    "FM": (FM,),
    "normalised FM": (dataclasses.replace(FM, normalization="layer"),),
    "normalised plain FM": (dataclasses.replace(FM, kind="plain", normalization="layer"),),
    "attentive FM": (
        dataclasses.replace(FM, kind="attentive", normalization="layer", attention_rows=2, attention_hidden=(5,)),
    ),
    "FM and linear": (FM, LinearCompression(outputs=2)),
    "several widths of outputs": (DlrmTower(dim=D, each=1, mixed=1), DcnTower(dim=D)),
}


def literal_mlp(p, x):
    for i in range(len(p["layers"])):
        x = x @ p["layers"][i]["kernel"] + p["layers"][i]["bias"]
        x = np.maximum(x, 0) if i < len(p["layers"]) - 1 else x
    return x


def literal_dlrm(config, p, x, room):
    del room
    parts = []
    if config.mixed:
        parts += list((x.reshape(-1) @ p["mixed"]["kernel"][: x.size] + p["mixed"]["bias"]).reshape(-1, D))
    if config.each:
        parts += [v for e in x for v in (e @ p["each"]["kernel"] + p["each"]["bias"]).reshape(-1, D)]
    return np.stack(parts)


def literal_dcn(config, p, x, room):
    del room
    x0 = flat = x.reshape(-1)
    for i in range(config.cross_layers):
        cross = p["crosses"][i]
        inner = flat @ cross["down"][: x.size] if config.cross_rank else flat
        kernel = cross["affine"]["kernel"][: len(inner), : x.size]
        flat = x0 * (inner @ kernel + cross["affine"]["bias"][: x.size]) + flat
    width = len(x) * D
    return (flat @ p["out"]["kernel"][: x.size, :width] + p["out"]["bias"][:width]).reshape(-1, D)


def literal_fm(config, p, x, room):
    f, n = x @ x.T, len(x)
    k = room if config.kind == "plain" else config.rank
    if config.kind == "lowrank":
        f = f @ p["fm"]["y"][:n]
    if config.kind == "attentive":
        y = literal_mlp(p["fm"]["mlp"], (p["fm"]["compress"]["weight"][:, :n] @ x).reshape(-1))
        f = f @ (y.reshape(room, k)[:n] / np.sqrt(room))
    places = (np.arange(n)[:, None] * k + np.arange(f.shape[1])).reshape(-1)  # of the entries of the largest tower
    f = f.reshape(-1)
    if config.normalization == "layer":
        f = (f - f.mean()) / np.sqrt(f.var() + 1e-5) * p["fm_norm"]["scale"][places] + p["fm_norm"]["bias"][places]
    first = p["mlp"]["layers"][0]
    rest = {"layers": {**p["mlp"]["layers"], 0: {**first, "kernel": first["kernel"][places]}}}
    return literal_mlp(rest, f).reshape(-1, N)


LITERAL = {
    DlrmTower: literal_dlrm,
    DcnTower: literal_dcn,
    LinearCompression: lambda config, p, x, room: p["weight"][:, : len(x)] @ x,
    FactorizationMachine: literal_fm,
}


def built(config, schema, randomised, dtypes=F64):
    return randomised(config.task(schema).init(nnx.Rngs(0), dtypes))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_tower_is_its_literal_form_whatever_the_size_of_the_largest(
    name, schema, examples, randomised, numpy_parameters, x64
):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=MODULES[name])
    model = built(config, schema, randomised)
    embedded = examples(config.task(schema)).embedded
    got = nnx.jit(lambda model, embedded: model.interact(*model.gather(embedded)))(model, embedded)
    got = np.asarray(got)
    params = numpy_parameters(model)["modules"]
    for t, tower in enumerate(UNEQUAL.towers):
        own = jax.tree.map(lambda p, t=t: p[t], params)
        at = [place for name, place in config.places().items() if name.startswith(f"tower {t},")]
        assert len(at) == sum(config.outputs_of(len(tower)))
        for b in range(3):
            x = np.stack([np.asarray(embedded[name][b]) for name in tower])
            wanted = [LITERAL[type(m)](m, own[i], x, 3) for i, m in enumerate(config.modules)]
            found = np.stack([got[place][b] for place in at])
            np.testing.assert_allclose(found, np.concatenate(wanted), rtol=1e-11, atol=1e-11)  # round-off


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_finite_differences(name, schema, examples, randomised, x64):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=MODULES[name])
    model = built(config, schema, randomised)
    graph, state = nnx.split(model)
    batch = examples(config.task(schema), 2)

    @jax.jit
    def logits(state, embedded):
        return nnx.merge(graph, state)(embedded, batch["dense"])

    check_grads(logits, (state, batch.embedded), order=1, modes=("rev",), eps=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("base", [DLRM, DCN, WUKONG, DHEN], ids=lambda base: type(base).__name__)
def test_towers_without_modules_are_the_flat_model_to_the_bit_however_features_are_divided(
    base, schema, examples, randomised
):
    flat = built(base, schema, randomised, nn.FLOAT32)
    batch = examples(base.task(schema), dtype=np.float32)
    call = jax.jit(
        lambda model, state, batch: nnx.merge(model, state)(batch.embedded, batch["dense"]), static_argnums=0
    )
    expected = call(*nnx.split(flat), batch)
    for towers in (UNEQUAL.towers, (("c2", "c1"), ("c4",), ("c0", "c3")), (schema.keys,)):
        config = TowersConfig(base=base, towers=Partition(towers=towers))
        model = config.task(schema).init(nnx.Rngs(0), nn.FLOAT32)
        nnx.update(model.over, nnx.state(flat))
        np.testing.assert_array_equal(call(*nnx.split(model), batch), expected)
        assert config.compression == 1
        assert config.task(schema).dense_parameters() == base.task(schema).dense_parameters()


@pytest.mark.slow
def test_linear_modules_are_a_block_diagonal_map_after_a_flat_lookup(schema, examples, randomised, x64):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=(DlrmTower(dim=D, mixed=2, each=0),))
    mixing = dataclasses.replace(config, modules=(LinearCompression(outputs=2),))
    embedded = examples(config.task(schema)).embedded
    order = [name for tower in UNEQUAL.towers for name in tower]
    flat = np.stack([np.asarray(embedded[name]) for name in order], axis=1)  # B F N
    for case in (config, mixing):
        model = built(case, schema, randomised)
        module = model.modules[0]
        if case is mixing:
            kernels = np.swapaxes(np.kron(np.asarray(module.weight[...]), np.eye(N)), 1, 2)
            bias = 0
        else:
            kernels, bias = np.asarray(module.mixed.kernel[...]), np.asarray(module.mixed.bias[...]).reshape(-1)
        (first, second), columns = kernels, kernels.shape[2]
        diagonal = np.zeros((5 * N, 2 * columns))
        diagonal[: 2 * N, :columns], diagonal[2 * N :, columns:] = first[: 2 * N], second
        wanted = (flat.reshape(len(flat), -1) @ diagonal + bias).reshape(len(flat), 4, -1)
        x = model.interact(*model.gather(embedded))
        found = np.stack([x[place] for place in case.places().values()], axis=1)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_a_smaller_tower_lacks_has_no_gradient(schema, examples, randomised, x64):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=MODULES["several widths of outputs"])
    model = built(config, schema, randomised)
    graph, state = nnx.split(model)
    batch = examples(config.task(schema))
    found = jax.jit(jax.grad(lambda state: nnx.merge(graph, state)(batch.embedded, batch["dense"]).sum()))(state)
    dlrm, dcn = found["modules"][0], found["modules"][1]
    own = 2 * N  # of the tower of two features
    for gradient in (dlrm["mixed"]["kernel"], dcn["out"]["kernel"], dcn["crosses"][0]["affine"]["kernel"]):
        assert not np.any(gradient[0, own:])
        assert np.any(gradient[0, :own]) and np.any(gradient[1, own:])  # noqa: PT018
    assert not np.any(dcn["crosses"][0]["affine"]["bias"][0, own:])
    assert not np.any(dcn["out"]["bias"][0, 2 * D :])


@pytest.mark.slow
def test_every_parameter_of_a_module_has_an_axis_of_towers(schema):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=MODULES["several widths of outputs"])
    for path, variable in nnx.to_flat_state(nnx.state(config.task(schema).init(nnx.Rngs(0), nn.FLOAT32))):
        axes = variable.get_metadata()["logical_axes"]
        assert (axes[0] == "towers") == (path[0] == "modules")
        assert len(axes) == variable[...].ndim
        if path[0] == "modules":
            assert variable.shape[0] == 2
            if "bias" not in path:
                assert not np.array_equal(variable[...][0], variable[...][1])  # each is drawn by itself


@pytest.mark.slow
def test_towers_multiply_in_a_format_as_each_would_alone(schema, examples, randomised):
    config = DlrmTower(dim=D, mixed=1)
    model = built(TowersConfig(base=DLRM, towers=UNEQUAL, modules=(config,)), schema, randomised, nn.FLOAT32)
    x, present = model.gather(examples(DLRM.task(schema), dtype=np.float32).embedded)
    stacked = dict(nnx.to_flat_state(nnx.state(model.modules[0])))
    axes = {"/".join(path): variable.get_metadata()["logical_axes"] for path, variable in stacked.items()}
    found = weights.weights_of(axes)
    assert found == {"each": "each/kernel", "mixed": "mixed/kernel"}  # the biases, of two axes, are no matrices
    rule = QuantizationRule(weight_qtype="bdr_mx9", act_qtype="bdr_mx9", tail="pad")

    def in_format(module):
        for linear in (module.each, module.mixed):
            linear.kernel.set_value(weights.FormattedWeight(array=linear.kernel[...], rule=rule, path=""))
        return module

    plain = model.interact(x, present)
    kernels = {name: getattr(model.modules[0], name).kernel[...] for name in found}
    in_format(model.modules[0])
    got = model.interact(x, present)
    assert not np.allclose(got, plain, rtol=1e-4, atol=0)
    for t in range(2):
        alone = config.build(LayerInputs(n=3, d=N), rngs=nnx.Rngs(0), dtypes=nn.FLOAT32)
        for name in found:
            getattr(alone, name).kernel[...] = kernels[name][t]
            getattr(alone, name).bias[...] = stacked[name, "bias"][...][t]
        np.testing.assert_allclose(got[t], in_format(alone)(x[t]), rtol=1e-6, atol=1e-6)


def test_matrices_of_towers_are_not_made_int8(schema):
    model = (
        TowersConfig(base=DLRM, towers=UNEQUAL, modules=(DcnTower(dim=D),)).task(schema).init(nnx.Rngs(0), nn.FLOAT32)
    )
    found = operators.find(ModelShape.of(model))
    assert {path: operator.kind for path, operator in found.items()} == {
        "modules/0/crosses/0/affine": "other",
        "modules/0/out": "other",
        **{f"over/{name}/layers/{i}": "linear" for name in ("bottom", "top") for i in range(2)},
    }


def in_turn(features, towers):
    names = [f"c{i}" for i in range(features)]
    return Partition(towers=tuple(tuple(names[t::towers]) for t in range(towers)))


def test_widths_and_compression_are_those_of_the_paper():
    base, towers = DlrmConfig(dim=128), in_turn(26, 8)
    for dim, ratio in {64: 2, 32: 4, 16: 8, 8: 16}.items():
        assert TowersConfig(base=base, towers=towers, modules=(DlrmTower(dim=dim),)).compression == ratio
    config = TowersConfig(base=base, towers=towers, modules=(DlrmTower(dim=64, each=3, mixed=2),))
    assert [sum(config.outputs_of(n)) * config.dim for n in (3, 4)] == [64 * (3 * 3 + 2), 64 * (3 * 4 + 2)]
    config = TowersConfig(base=DcnV2Config(dim=128), towers=towers, modules=(DcnTower(dim=128),))
    assert (config.outputs_of(4), config.dim, config.compression) == ((4,), 128, 1)
    assert TowersConfig(
        base=base, towers=in_turn(26, 16), modules=(DlrmTower(dim=128, each=0, mixed=1),)
    ).compression == (26 / 16)


def test_parameters_and_flops_are_those_of_the_over_arch_and_of_towers_of_the_largest_size(criteo):
    base, towers = DlrmConfig(dim=128), in_turn(26, 8)
    task = TowersConfig(base=base, towers=towers, modules=(DlrmTower(dim=64),)).task(criteo)
    flat = dataclasses.replace(base, dim=64).task(criteo)
    assert task.dense_parameters() == flat.dense_parameters() + 8 * (128 * 64 + 64)
    assert task.flops_per_example() == flat.flops_per_example() + 6 * 8 * 4 * 128 * 64


@pytest.mark.parametrize(
    ("towers", "message"),
    [
        ((), r"every tower must have one; there is no tower\."),
        ((("a",), ()), r"every tower must have one; tower 1 is empty\."),
        ((("a", "b"), ("b",)), r"every tower must have one; b appear twice\."),
        ((("c0", "c1"), ("c3", "c4")), r"5 categorical features of the data between them; c2 are in none\. Set model"),
        ((("c0", "c1", "c2"), ("c3", "c4", "x")), r"between them; x are not in the data\. Set model.towers"),
    ],
)
def test_what_is_no_partition_of_the_features_is_refused(towers, message, schema):
    with pytest.raises(UserError, match=message):
        TowersConfig(base=DLRM, towers=Partition(towers=towers)).task(schema)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centred:
    """Vectors without their mean over the features, each times a number of its own; a module as users write them."""

    dim: int = N
    more: int = 0

    def outputs_of(self, features):
        return features + self.more

    def build(self, inputs, *, rngs, dtypes):
        del rngs
        return Centring(inputs.n, dtypes)


class Centring(nnx.Module):
    def __init__(self, features, dtypes):
        self.scale = nnx.Param(jnp.ones((features, 1, 1), dtypes.params))

    def __call__(self, x, *, key=None, present=None):
        del key
        return self.scale[...] * (x - x.sum(0, keepdims=True) / present.sum().astype(x.dtype))


def test_a_module_of_ones_own_leaves_out_features_that_a_tower_lacks(schema, examples, randomised, x64):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=(Centred(),))
    model, batch = built(config, schema, randomised), examples(config.task(schema))
    got, scale = model.interact(*model.gather(batch.embedded)), np.asarray(model.modules[0].scale[...])
    assert scale.shape == (2, 3, 1, 1)
    for t, tower in enumerate(UNEQUAL.towers):
        x = np.stack([np.asarray(batch.embedded[name]) for name in tower])
        wanted = scale[t, : len(tower)] * (x - x.mean(0))
        np.testing.assert_allclose(got[t, : len(tower)], wanted, rtol=1e-11, atol=1e-12)
    assert model(batch.embedded, batch["dense"]).shape == (6, 2)


@pytest.mark.parametrize("wrong", [{"dim": 3}, {"more": 1}], ids=["width", "number"])
def test_a_module_of_ones_own_returns_what_it_says(wrong, schema, examples):
    config = TowersConfig(base=DLRM, towers=UNEQUAL, modules=(Centred(**wrong),))
    task = config.task(schema)
    batch = examples(task, dtype=np.float32)
    model = task.init(nnx.Rngs(0), nn.FLOAT32)
    with pytest.raises(UserError, match=r"^Centred: its module returned \[3, 6, 4\], .* Mend .* `dim` and `outputs_of"):
        model(batch.embedded, batch["dense"])


@pytest.mark.parametrize(
    "module",
    [FeatureCross(outputs=4), MlpExperts(outputs=4), "linear", DlrmTower],
    ids=["cross", "experts", "text", "class"],
)
def test_what_is_no_module_of_a_tower_is_refused(module):
    with pytest.raises(UserError, match=r"^TowersConfig: modules must be DlrmTower, .* or one of your own .*; got "):
        TowersConfig(base=DLRM, towers=UNEQUAL, modules=(module,))


def test_a_forgotten_comma_is_shown():
    with pytest.raises(
        UserError, match=r"modules must be a tuple, \(DlrmTower\(\.\.\.\),\) with the comma; got DlrmTow"
    ):
        TowersConfig(base=DLRM, towers=UNEQUAL, modules=(DlrmTower(dim=2)))
    with pytest.raises(
        UserError, match=r"^Partition: towers must be tuples of names, .* with the commas; got \('a', 'b'\)"
    ):
        Partition(towers=(("a"), ("b")))
    with pytest.raises(UserError, match=r"with the commas; got 'ab'"):
        Partition(towers="ab")


def test_towers_without_a_partition_are_refused():
    with pytest.raises(
        UserError, match=r"^TowersConfig: towers must be a Partition; got \(\('a',\), \('b',\)\)\. Write Part"
    ):
        TowersConfig(base=DLRM, towers=(("a",), ("b",)))


def test_what_is_no_model_over_vectors_is_refused():
    with pytest.raises(UserError, match=r"^TowersConfig: base must be .* DhenConfig; got LogisticConfig\("):
        TowersConfig(base=LogisticConfig(), towers=UNEQUAL, modules=(DlrmTower(dim=4),))


def test_modules_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"of one width; got DlrmTower 3, LinearCompression 4\. Give .* tables', 4\."):
        TowersConfig(base=DLRM, towers=UNEQUAL, modules=(DlrmTower(dim=3), LinearCompression(outputs=1)))
    with pytest.raises(UserError, match=r"of one width; got DlrmTower 4, DlrmTower 8\."):
        TowersConfig(base=DLRM, towers=UNEQUAL, modules=(DlrmTower(dim=4), DlrmTower(dim=8)))
    with pytest.raises(ValueError, match=r"DlrmTower: each \+ mixed must be a whole number of at least 1; got 0"):
        DlrmTower(dim=3, each=0)
    alone = Partition(towers=(tuple("ab"),))
    schema = Schema(categorical=tuple(Categorical(name=name, rows=4) for name in "ab"))
    with pytest.raises(UserError, match=r"^DlrmConfig: .* needs two vectors or dense features; got 1 and no dense"):
        config = TowersConfig(base=DLRM, towers=alone, modules=(LinearCompression(outputs=1),))
        config.task(schema).dense_parameters()
    with pytest.raises(ValueError, match=r"make 3 of a width of 4, which does not go into vectors of 2 evenly"):
        TowersConfig(base=WUKONG, towers=UNEQUAL, modules=(DlrmTower(dim=3),))


def test_a_partition_is_read_as_it_was_written_and_nothing_else_is(tmp_path):
    UNEQUAL.save(tmp_path / "towers.json")
    assert Partition.load(tmp_path / "towers.json") == UNEQUAL
    for text, message in {"{": "cannot read .* as JSON", '{"towers": [1]}': "must be .*towers"}.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=message):
            Partition.load(tmp_path / "bad.json")


@pytest.mark.slow
def test_dropout_of_a_tower_acts_only_with_a_key(examples):
    schema = Schema(categorical=tuple(Categorical(name=f"c{i}", rows=10) for i in range(4)), dense=("x",))
    machine = dataclasses.replace(FM, dropout=0.5, hidden=(64,))
    config = TowersConfig(base=DLRM, towers=in_turn(4, 2), modules=(machine,))
    model = config.task(schema).init(nnx.Rngs(0), nn.FLOAT32)
    batch = examples(config.task(schema), dtype=np.float32)
    call = nnx.jit(lambda model, key: model(batch.embedded, batch["dense"], key=key))
    plain = call(model, None)
    keyed = [call(model, jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(keyed[0], keyed[1])
    assert not np.array_equal(plain, keyed[0])
    assert not np.array_equal(keyed[0], keyed[2])
