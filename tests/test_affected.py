"""Changes and the tests that they reach: by imports, at any depth and inside of functions, and by what is stated."""

import subprocess

import affected
import pytest


@pytest.mark.parametrize(
    ("file", "reached", "spared"),
    [
        # At further hand: the kernel, the layer that uses it, models, runs.
        ("scalejax/kernels/mx/__init__.py", "tests/kernels/test_mx.py", "tests/data/test_splits.py"),
        # A backend, which is loaded by its name.
        ("scalejax/kernels/block_quant/xla.py", "tests/kernels/test_block_quant.py", "tests/data/test_splits.py"),
        ("scalejax/models/graph/gcn.py", "tests/models/graph/test_layers.py", "tests/models/llm/test_llama3.py"),
        # Recipes are found by name; a module may be imported inside of a function.
        ("scalejax/configs/recsys/wukong.py", "tests/configs/test_recipes.py", "tests/kernels/test_mx.py"),
        # Helpers of tests, at further hand: small_run uses `changes`.
        ("tests/cases/changes.py", "tests/train/tables/test_tiers.py", "tests/nn/test_layers.py"),
        ("tests/cli/conftest.py", "tests/cli/commands/test_doctor.py", "tests/nn/test_layers.py"),
        ("tests/nn/test_layers.py", "tests/nn/test_layers.py", "tests/nn/test_attention.py"),
        # Files that are no modules.
        ("docs/log.md", "tests/test_documents.py", "tests/nn/test_layers.py"),
        ("tests/outside/shapes.py", "tests/train/test_outside.py", "tests/nn/test_layers.py"),
        ("benchmarks/gpu_mx.py", "tests/bench/test_gpu_mx.py", "tests/nn/test_layers.py"),
    ],
)
def test_a_change_reaches_its_tests_and_spares_others(file, reached, spared):
    assert (affected.ROOT / file).exists()
    assert (affected.ROOT / spared).exists()
    found = affected.tests_of([file])
    assert reached in found
    assert spared not in found


@pytest.mark.parametrize("file", ["scalejax/errors.py", "pyproject.toml", "tests/conftest.py"])
def test_a_change_that_reaches_most_tests_asks_for_the_default_tier(file):
    assert affected.tests_of([file]) == ["tests"]


def test_a_change_of_nothing_reaches_nothing():
    assert affected.tests_of([]) == []
    assert affected.tests_of(["LICENSE", "scalejax/gone.py"]) == []


def test_stated_edges_name_what_exists():
    tests = [str(path.relative_to(affected.ROOT)) for path in (affected.ROOT / "tests").rglob("test_*.py")]
    for pattern, names in affected.STATED.items():
        assert any(affected.fnmatch.fnmatch(test, pattern) for test in tests), pattern
        for name in names:
            assert affected.fnmatch.filter(affected.modules(), name), name
    for pattern in (pattern for patterns in affected.READ.values() for pattern in patterns):
        assert any(affected.fnmatch.fnmatch(test, pattern) for test in tests), pattern


def test_a_base_or_checkout_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert affected.main(["main"]) == 2
    assert "no checkout of git" in capsys.readouterr().err
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    assert affected.main(["nothing"]) == 2
    assert "BASE 'nothing' is no commit here" in capsys.readouterr().err
    (tmp_path / "new").write_text("2")
    (tmp_path / "file").write_text("2")
    assert affected.changed("HEAD") == ["file", "new"]


def test_a_file_that_cannot_be_parsed_is_among_its_own_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(affected, "HUB", 2)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_half.py").write_text("def test_half(:\n")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other(): ...\n")
    assert affected.tests_of(["tests/test_half.py"]) == ["tests/test_half.py"]
