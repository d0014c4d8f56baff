"""`--set` changes exactly one field, typed by its annotation, and says what was wanted otherwise."""

import dataclasses
import pathlib

import pytest
from changes import changed

from scalejax import optim
from scalejax.configs import discovery, overrides
from scalejax.data.images.sources import Digits, ImageFolder
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.data.splits import Fractions
from scalejax.errors import UserError
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.train.experiment import Phase

EXAMPLES = pathlib.Path(__file__).parent / "example_recipes.py"


@pytest.fixture(scope="module")
def experiment():
    return discovery.find(str(EXAMPLES)).build()


def _is_whole(value):
    """Whether a value has paths of its own below it."""
    return dataclasses.is_dataclass(value) or (isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)))


def _changed(experiment, *sets):
    """Paths of leaves that differ after the overrides, with their new value."""
    before = dict(overrides.flatten(experiment))
    after = dict(overrides.flatten(overrides.apply(experiment, sets)))
    return {
        path: value
        for path, value in after.items()
        if not _is_whole(value) and (path not in before or before[path] != value)
    }


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("steps=2000", "steps", 2000),
        ("steps=100_000", "steps", 100_000),
        ("model.layers=3", "model.layers", 3),
        ("data.batch_size = 2048", "data.batch_size", 2048),
        ("model.mlp.dropout=1", "model.mlp.dropout", 1.0),
        ("model.mlp.dropout=1e-1", "model.mlp.dropout", 0.1),
        ("model.mlp.hidden=512,256", "model.mlp.hidden", (512, 256)),
        ("model.mlp.hidden=[512, 256]", "model.mlp.hidden", (512, 256)),
        ("model.mlp.hidden=512", "model.mlp.hidden", (512,)),
        ("model.mlp.hidden=[]", "model.mlp.hidden", ()),
        ("model.mlp.hidden.1=16", "model.mlp.hidden", (64, 16)),
        ("model.important=carrier,dest", "model.important", ("carrier", "dest")),
        ("model.important=1,2", "model.important", ("1", "2")),
        ("model.kind=low_rank", "model.kind", "low_rank"),
        ("model.scale=0.5", "model.scale", 0.5),
        ("model.bias=false", "model.bias", False),
        ("data.path=a=b.parquet", "data.path", "a=b.parquet"),
        ("data.path=7", "data.path", "7"),
        ("evaluation.split='none'", "evaluation.split", "none"),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate.value", 0.5),
        ("placement.mesh.tensor=4", "placement.mesh.tensor", 4),
        ('placement.rules.axes=[["vocab", ["tensor"]]]', "placement.rules.axes", (("vocab", ("tensor",)),)),
    ],
)
def test_sets_one_field_by_its_type(experiment, text, path, value):
    changed = _changed(experiment, text)
    assert changed == {path: value}
    assert type(changed[path]) is type(value)


def test_sets_fields_of_dataclasses_in_a_tuple(experiment):
    assert _changed(experiment, "model.heads.1.hidden=4,2") == {"model.heads.1.hidden": (4, 2)}


def test_none_clears_an_optional_field(experiment):
    set_first = overrides.apply(experiment, ["model.scale=2.0", "data.path=x", "model.interaction=Mlp"])
    cleared = overrides.apply(set_first, ["model.scale=none", "data.path=None", "model.interaction=none"])
    assert cleared == experiment


def test_a_type_name_chooses_a_member_of_a_union_with_its_defaults(experiment):
    got = overrides.apply(experiment, ["optimizer=AdamW", "tables.optimizer=Adagrad"])
    assert got.optimizer == optim.AdamW()
    assert type(got.tables.optimizer).__name__ == "Adagrad"


def test_type_names_make_a_tuple_of_dataclasses(experiment):
    two = overrides.apply(
        experiment,
        [
            "quantization=QuantizationRule,QuantizationRule",
            "quantization.0.module_path=head",
            "quantization.1.weight_qtype=bdr_mx6",
            "quantization.1.tail=pad",
        ],
    )
    assert two.quantization == (
        QuantizationRule(module_path="head"),
        QuantizationRule(weight_qtype="bdr_mx6", tail="pad"),
    )
    assert overrides.apply(two, ["quantization=[QuantizationRule]"]).quantization == (QuantizationRule(),)
    assert overrides.apply(two, ["quantization=[]"]).quantization == ()
    with pytest.raises(UserError, match="quantization must be a list, each item the type name QuantizationRule"):
        overrides.apply(experiment, ["quantization=bdr_mx6"])
    with pytest.raises(UserError, match="nearest are bdr_mx6"):
        overrides.apply(two, ["quantization.0.act_qtype=mx6"])
    with pytest.raises(UserError, match="cannot become a MappedFeatures by name"):
        overrides.apply(experiment, ["tables.id_maps=MappedFeatures"])


def test_a_file_is_read_where_the_type_of_the_field_can(experiment, tmp_path):
    plan = ShardingPlan(tables=(TablePlan(table="a", kind="table_wise", ranks=(1,)),), devices=2)
    plan.save(tmp_path / "plan.json")
    assert overrides.apply(experiment, [f"tables.sharding={tmp_path / 'plan.json'}"]).tables.sharding == plan
    changed = overrides.apply(
        experiment, [f"tables.sharding={tmp_path / 'plan.json'}", "tables.sharding.tables.0.ranks=0"]
    )
    assert changed.tables.sharding.tables[0].ranks == (0,)
    with pytest.raises(UserError, match=r"--set tables.sharding=none\.json: .*cannot read none\.json"):
        overrides.apply(experiment, ["tables.sharding=none.json"])
    with pytest.raises(UserError, match="exchange must be the type name Exchange"):
        overrides.apply(experiment, ["tables.exchange=plan.json"])


def test_sets_apply_in_order(experiment):
    got = overrides.apply(
        experiment,
        [
            "steps=1",
            "steps=2",
            "optimizer=AdamW",
            "optimizer.learning_rate=WarmupCosine",
            "optimizer.learning_rate.peak=2e-3",
        ],
    )
    assert got.steps == 2
    assert got.optimizer == optim.AdamW(learning_rate=optim.WarmupCosine(peak=2e-3))


def test_a_number_for_a_schedule_means_constant(experiment):
    cosine = overrides.apply(experiment, ["optimizer.learning_rate=WarmupCosine"])
    got = overrides.apply(cosine, ["optimizer.learning_rate=1e-4"])
    assert got.optimizer.learning_rate == optim.Constant(value=1e-4)


def test_a_phase_is_the_run_as_it_is_in_it(experiment):
    later = Phase(name="later", steps=7, changes={"gradients.clip": 3.0, "optimizer": optim.Sgd()})
    own = dataclasses.replace(experiment, phases=(Phase(name="same", steps=2), later))
    found = overrides.apply(own, ["seed=4", "phase=later", "optimizer.momentum=0.5"])
    wanted = dataclasses.replace(own, seed=4, phases=(), steps=7, optimizer=optim.Sgd(momentum=0.5))
    wanted = changed(wanted, gradients__clip=3.0)
    assert found == wanted
    assert overrides.apply(own, ["phase=same"]).steps == experiment.steps + 2  # which share the optimizer
    with pytest.raises(UserError, match=r"--set phase=late: the run has the phases same, later\. Name one"):
        overrides.apply(own, ["phase=late"])
    with pytest.raises(UserError, match=r"--set phase=late: the run has no phases\. Leave it out"):
        overrides.apply(experiment, ["phase=late"])


def test_the_experiment_itself_is_untouched(experiment):
    before = experiment.steps
    overrides.apply(experiment, ["steps=77"])
    assert experiment.steps == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps=5.0", "steps must be an integer, for example --set steps=10; got '5.0'"),
        ("steps=true", "must be an integer"),
        ("steps=1e3", "must be an integer"),
        ("steps=", "must be an integer"),
        ("model.bias=1", "must be true or false"),
        ("model.bias=yes", "must be true or false"),
        ("model.mlp.dropout=true", "must be a number"),
        ("model.mlp.dropout=nan", "must be a number"),
        ("model.mlp.dropout=none", "must be a number"),
        ("model.mlp.hidden=512,big", "must be a list, each item an integer, for example --set model.mlp.hidden=64,32"),
        ("model.kind=cubic", "must be one of plain, low_rank, for example --set model.kind=plain"),
        ("model.scale=x", "must be a number or none"),
        ("optimizer=Lion", "type name Sgd or the type name Adam or the type name AdamL2 or"),
        ("model.heads=3", "must be a list"),
        ("model=Wukong", "model is of type Model and cannot be set as a whole. Set its fields (model.layers"),
        ("model.interaction=Deep", "cannot become a Deep by name: it needs depth"),
        ("model.mlp.hidden.2=4", "has 2 items, the last is model.mlp.hidden.1"),
        ("steps", "must be path=value"),
        ("=3", "must be path=value"),
    ],
)
def test_wrong_values_say_what_was_wanted(experiment, text, words):
    with pytest.raises(UserError) as caught:
        overrides.apply(experiment, [text])
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--set {text}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=3", "Experiment has no field 'layers'. Nearest: model.layers. Fields here: model, data, steps"),
        ("modle.layers=3", "Nearest: model.layers"),
        ("model.mlp.hiden=3", "model.mlp has no field 'hiden'. Nearest: model.mlp.hidden"),
        ("model.mlp.hiden=3", "Fields here: model.mlp.hidden, model.mlp.dropout"),
        ("batch_size=3", "Nearest: data.batch_size"),
        ("steps.x=3", "steps is '10' and has no fields"),
        ("model.mlp.hidden.first=3", "is a tuple: give a position"),
        (
            "optimizer.weight_decay=0.1",
            "of type Adam, which has no field 'weight_decay'; put --set optimizer=Sgd or --set optimizer=AdamW",
        ),
        ("optimizer.learning_rate.peak=1", "put --set optimizer.learning_rate=WarmupCosine or --set optimizer"),
    ],
)
def test_unknown_paths_name_the_nearest_and_the_fields_at_that_level(experiment, text, words):
    with pytest.raises(UserError) as caught:
        overrides.apply(experiment, [text])
    assert words in str(caught.value)


def test_a_refusal_of_the_dataclass_names_the_path(experiment):
    with pytest.raises(UserError, match=r"--set model\.layers=0: layers must be at least 1; got 0"):
        overrides.apply(experiment, ["model.layers=0"])


def test_shown_values_can_be_set_again(experiment):
    for path, value in overrides.flatten(experiment):
        if not _is_whole(value):
            assert overrides.apply(experiment, [f"{path}={overrides.show(value)}"]) == experiment, path


def test_images_among_text_are_chosen_by_name(experiment):
    experiment = dataclasses.replace(experiment, data=TwoModalityData())
    sets = ["data.images=ImageFolder", "data.images.path=pictures", "data.image_share=0.2,0.5", "data.split.train=0.6"]
    changed = overrides.apply(experiment, [*sets, "data.caption=none"]).data
    assert changed == TwoModalityData(
        images=ImageFolder(path="pictures"),
        image_share=(0.2, 0.5),
        split=Fractions(train=0.6, by="position"),
        caption="none",
    )
    assert overrides.apply(experiment, ["data.images=Digits"]).data.images == Digits()
    for path, value in overrides.flatten(experiment):
        if not _is_whole(value):
            assert overrides.apply(experiment, [f"{path}={overrides.show(value)}"]) == experiment, path
