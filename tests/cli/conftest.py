"""A run of the command line in this process, and one in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest
import typer.testing

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment():
    """Commands set variables of the environment for the jax they import: put them back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def example():
    """A recipe file of a user."""
    return str(ROOT / "tests" / "configs" / "example_recipes.py")


@pytest.fixture(scope="session")
def language_run(tmp_path_factory):
    """language_run(recipe) -> folder of a run of two steps on a small text."""

    def run(recipe):
        from scalejax import configs
        from scalejax.configs import serialization
        from scalejax.train import loop, run_folder

        folder = tmp_path_factory.mktemp("runs") / "run"
        sets = ["steps=2", "data.batch_size=8", f"data.folder={tmp_path_factory.mktemp('text')}"]
        text = tmp_path_factory.mktemp("source") / "text.txt"
        text.write_text("def f(x):\n    return x + 1\n\n" * 400)
        sets += [f"data.path={text}", "data.split.by=position", "data.split.train=0.8", "data.split.validation=0.2"]
        experiment = configs.load(recipe, sets)
        loop.train(
            experiment,
            workdir=run_folder.choose(folder, "run", "auto"),
            resume="auto",
            recipe=recipe,
            record=serialization.record(recipe, sets, experiment),
            console=None,
        )
        return folder

    return run


@pytest.fixture
def invoke():
    """invoke(*arguments) -> result with exit_code, stdout, stderr; a bug is raised."""

    def run(*arguments):
        from scalejax.cli.app import app

        result = typer.testing.CliRunner().invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def scalejax(tmp_path):
    """scalejax(*arguments, **variables) -> CompletedProcess of `python -m scalejax` in an empty folder."""

    def run(*arguments, **variables):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", **variables}
        return subprocess.run(
            [sys.executable, "-m", "scalejax", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={name: value for name, value in environ.items() if value is not None},
        )

    return run
