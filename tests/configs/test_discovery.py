"""Recipes are found by annotation, by every kind of name, without importing more than the one that is wanted."""

import pathlib
import subprocess
import sys

import pytest

from scalejax.configs import discovery
from scalejax.errors import UserError
from scalejax.train.experiment import Experiment

EXAMPLES = pathlib.Path(__file__).parent / "example_recipes.py"
HEADER = "from scalejax.train.experiment import Experiment\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of recipes in place of the package's own."""
    folder = tmp_path / "configs"
    (folder / "recsys").mkdir(parents=True)
    (folder / "llm").mkdir()
    (folder / "recsys" / "__init__.py").write_text("")
    (folder / "recsys" / "dlrm.py").write_text(
        '"""DLRM on flights."""\n'
        + HEADER
        + "def flights() -> Experiment:\n    return Experiment(model=A(x=1), steps=1)\n"
        'def big_one() -> Experiment:\n    """Larger."""\n'
        "    mesh = MeshShape(fsdp=8)\n    return replace(flights(), steps=2, placement=Placement(mesh=mesh))\n"
    )
    (folder / "llm" / "tiny.py").write_text(HEADER + "def smoke() -> Experiment: ...\n")
    monkeypatch.setattr(discovery, "_FOLDER", folder)
    return folder


def test_lists_annotated_public_functions_in_order(package):
    assert [r.name for r in discovery.listing()] == ["tiny-smoke", "dlrm-flights", "dlrm-big_one"]


def test_the_listing_says_what_the_docstring_says(package):
    big = discovery.find("dlrm-big-one")
    assert (big.summary, discovery.find("dlrm").summary) == ("Larger.", "DLRM on flights.")


@pytest.mark.parametrize("name", ["dlrm", "dlrm-flights", "DLRM", "dlrm_flights"])
def test_first_function_is_also_the_bare_stem(package, name):
    assert discovery.find(name).function == "flights"


def test_short_name_in_two_families_is_ambiguous(package):
    (package / "llm" / "dlrm.py").write_text(HEADER + "def flights() -> Experiment: ...\n")
    with pytest.raises(UserError, match=r"ambiguous.*scalejax\.configs\.llm\.dlrm:flights or .*recsys\.dlrm:flights"):
        discovery.find("dlrm")


def test_unknown_name_lists_the_nearest(package):
    with pytest.raises(UserError, match=r"Unknown recipe 'dlrm-flight'\. Nearest: dlrm-flights.*`scalejax recipes`"):
        discovery.find("dlrm-flight")


def test_finds_functions_of_a_user_file():
    assert discovery.find(str(EXAMPLES)).function == "first"
    recipe = discovery.find(f"{EXAMPLES}:second")
    assert recipe.slug == "example_recipes-second"
    experiment = recipe.build()
    assert type(experiment) is Experiment
    assert (experiment.steps, type(experiment.optimizer).__name__) == (3, "AdamW")


@pytest.mark.parametrize("function", ["_private", "with_argument", "not_annotated", "another_type", "absent"])
def test_other_functions_are_no_recipes(function):
    with pytest.raises(UserError, match=f"no recipe '{function}'.*It has: first, second"):
        discovery.find(f"{EXAMPLES}:{function}")


def test_finds_functions_of_an_importable_module(tmp_path, monkeypatch):
    (tmp_path / "my_recipes.py").write_text(HEADER + "def mine() -> Experiment: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert discovery.find("my_recipes:mine").module == "my_recipes"
    with pytest.raises(UserError, match=r"no importable module 'no_such_module\.at_all'"):
        discovery.find("no_such_module.at_all:mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f() -> Experiment:\n    return (\n", r"mine\.py, line 2: '\(' was never closed: return \("),
        ("x = 1\n", "has no recipe.*annotated `-> Experiment`"),
        ("def f() -> Experiment: ...\ndef f() -> Experiment: ...\n", "'f' is ambiguous.*line 1 and again in line 2"),
    ],
)
def test_names_what_is_wrong_with_the_text_of_a_user_file(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message):
        discovery.find(f"{tmp_path}/mine.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package\ndef f() -> 'Experiment': ...\n", r"line 1: ModuleNotFoundError: No module named"),
        ("def f() -> 'Experiment':\n\n    return missing\n", r"line 3: NameError"),
        ("def f() -> 'Experiment': return 3\n", r"must return a scalejax.*got int"),
    ],
)
def test_names_the_line_where_a_user_file_fails(tmp_path, text, message):
    (tmp_path / "failing.py").write_text(text)
    with pytest.raises(UserError, match=message):
        discovery.find(f"{tmp_path}/failing.py:f").build()


def test_missing_user_file():
    with pytest.raises(UserError, match=r"'nowhere/mine\.py' does not exist"):
        discovery.find("nowhere/mine.py:f")


def test_user_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_recipe.py").write_text("STEPS = 7\n")
    (tmp_path / "main_recipe.py").write_text(
        "import neighbour_of_recipe\nimport dataclasses\nfrom scalejax import configs\n"
        "def f() -> 'Experiment':\n"
        f"    return dataclasses.replace(configs.load({str(EXAMPLES)!r}), steps=neighbour_of_recipe.STEPS)\n"
    )
    assert discovery.find(f"{tmp_path}/main_recipe.py").build().steps == 7


def test_listing_and_finding_import_no_jax():
    code = (
        "import sys; from scalejax.configs import discovery; discovery.listing();"
        f"discovery.find({str(EXAMPLES)!r}); "
        "heavy = {'jax', 'flax', 'optax', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_short_names_of_the_package_are_unique():
    names = [r.name.replace("_", "-") for r in discovery.listing()]
    assert len(names) == len(set(names))
