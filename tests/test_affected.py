"""Changes and the tests that they reach: by the names that they change, at any depth, and by what is stated."""

import subprocess

import affected
import faults
import pytest

FILES = {
    "scalejax/__init__.py": "",
    "scalejax/optim/__init__.py": (
        "from scalejax.optim.optimizers import Adam as Adam\nfrom scalejax.optim.optimizers import Sgd as Sgd\n"
    ),
    "scalejax/optim/optimizers.py": (
        "from scalejax.optim.rates import rate\n\n"
        "class Adam:\n    decay: float = 0.9\n\n"
        "class Sgd:\n    def build(self):\n        return rate()\n\n"
        "Optimizer = Sgd | Adam\n"
    ),
    "scalejax/optim/rates.py": "def rate():\n    return 1\n",
    "scalejax/train/loop.py": (
        "from scalejax import optim\nfrom scalejax.optim.optimizers import Optimizer\n\n"
        "class Experiment:\n    optimizer: Optimizer = optim.Sgd()\n\n"
        "def train(experiment: Optimizer):\n    return Experiment\n"
    ),
    "scalejax/data/__init__.py": '_HOMES = {"Rows": "rows"}\n\ndef __getattr__(name): ...\n',
    "scalejax/data/rows.py": "class Rows: ...\n\ndef other(): ...\n",
    "scalejax/cli/commands/grow.py": "def run(): ...\n",
    "scalejax/kernels/bag/api.py": "def bag(): ...\n",
    "scalejax/kernels/bag/xla.py": "def run(): ...\n",
    "scalejax/kernels/bag/pallas_gpu.py": "def run(): ...\n",
    "tests/cases/small.py": (
        "from scalejax.train import loop\n\ndef experiment():\n    return loop.train()\n\ndef sizes(): ...\n"
    ),
    "tests/cases/worker.py": "from scalejax.data import Rows\n\nRows()\n",
    "tests/run/conftest.py": (
        "import pytest\nimport small\n\n@pytest.fixture\ndef finished():\n    return small.experiment()\n"
    ),
    "tests/run/test_fixture.py": "def test_a(finished): ...\n",
    "tests/run/test_other.py": "def test_a(): ...\n",
    "tests/run/test_set.py": "def test_a():\n    run('--set', 'optimizer=Adam')\n",
    "tests/run/test_worker.py": "def test_a():\n    start('worker.py')\n",
    "tests/run/test_grow.py": "def test_a():\n    scalejax('grow', 'RUN')\n",
    "tests/optim/test_adam.py": "from scalejax import optim\n\ndef test_a():\n    optim.Adam()\n",
    "tests/optim/test_sgd.py": "from scalejax.optim import Sgd\n\ndef test_a():\n    Sgd()\n",
    "tests/data/test_rows.py": "from scalejax import data\n\ndef test_a():\n    data.Rows()\n",
    "tests/kernels/test_bag.py": "from scalejax.kernels.bag.api import bag\n\ndef test_a():\n    bag()\n",
    "tests/kernels/test_gpu.py": "def test_a():\n    run('pallas_gpu')\n",
    "tests/test_faults.py": "",
    "tests/test_documents.py": "",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """{path: text} of a small project."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(affected, "HUB", 2.0)
    affected.project.cache_clear()
    yield tmp_path
    affected.project.cache_clear()


def reached(files, file, before, after):
    """Of a text of a file that becomes another one."""
    old = FILES.get(file)
    new = after if before is None else old.replace(before, after)
    assert new != old
    (files / file).parent.mkdir(parents=True, exist_ok=True)
    (files / file).write_text(new)
    named = affected.tests_of({file: (old, new)})
    return [test.removeprefix("tests/").removesuffix(".py") for test in named if test != "tests/test_faults.py"]


@pytest.mark.parametrize(
    ("file", "before", "after", "tests"),
    [
        # A class: who takes it from the package, and whose text has it for --set; not who takes another one.
        ("scalejax/optim/optimizers.py", "decay: float = 0.9", "decay: float = 1", ["optim/test_adam", "run/test_set"]),
        # At further hand: the default of an experiment, a helper, a fixture of the folder.
        ("scalejax/optim/rates.py", "return 1", "return 2", ["optim/test_sgd", "run/test_fixture"]),
        # A comment is no change; statements beside definitions change all of a file.
        ("scalejax/optim/rates.py", "return 1", "return 1  # why", []),
        ("scalejax/optim/rates.py", "def rate", "check()\n\ndef rate", ["optim/test_sgd", "run/test_fixture"]),
        # A new file, a new line of an __init__ or of a union, and a name that goes.
        ("scalejax/optim/lion.py", None, "class Lion: ...\n", []),
        ("scalejax/optim/optimizers.py", "Sgd | Adam", "Sgd | Adam | Lion", []),
        ("scalejax/optim/__init__.py", "from", "from scalejax.optim.lion import Lion as Lion\nfrom", []),
        ("scalejax/optim/__init__.py", "optimizers import S", "lion import S", ["optim/test_sgd", "run/test_fixture"]),
        # Names that load on first use.
        ("scalejax/data/rows.py", "class Rows: ...", "class Rows:\n    a = 1", ["data/test_rows", "run/test_worker"]),
        ("scalejax/data/rows.py", "def other(): ...", "def other():\n    return 1", []),
        # What is loaded by its name.
        ("scalejax/cli/commands/grow.py", "def run(): ...", "def run():\n    return 1", ["run/test_grow"]),
        ("scalejax/kernels/bag/xla.py", "def run(): ...", "def run():\n    return 1", ["kernels/test_bag"]),
        ("scalejax/kernels/bag/pallas_gpu.py", "def run(): ...", "def run():\n    return 1", ["kernels/test_gpu"]),
        # Helpers of tests, a worker that is started, tests themselves, also half written.
        ("tests/cases/small.py", "def sizes(): ...", "def sizes():\n    return 1", []),
        ("tests/cases/small.py", "return loop", "return 1, loop", ["run/test_fixture"]),
        ("tests/cases/worker.py", "Rows()", "Rows(1)", ["run/test_worker"]),
        ("tests/run/test_other.py", "def test_a(): ...", "def test_a(", ["run/test_other"]),
    ],
)  # fmt: skip
def test_a_change_reaches_the_tests_that_use_what_it_changes_and_spares_others(files, file, before, after, tests):
    assert reached(files, file, before, after) == tests


def test_files_that_are_no_code_reach_their_readers(files):
    assert affected.tests_of({"docs/log.md": (None, None)}) == ["tests/test_documents.py"]
    assert affected.tests_of({"pyproject.toml": (None, None)}) == ["tests"]
    assert affected.tests_of({"LICENSE": (None, None)}) == []


def test_a_change_of_a_hub_says_so_and_names_the_quick_tier_and_the_tests_of_its_folder(files, monkeypatch, capsys):
    monkeypatch.setattr(affected, "HUB", 0.0)
    named = affected.tests_of(
        {"scalejax/optim/rates.py": (FILES["scalejax/optim/rates.py"], "def rate():\n    return 2\n")}
    )
    assert "it is one of a hub" in capsys.readouterr().err
    assert named[0] == "tests/optim/test_sgd.py"
    assert "tests/run/test_fixture.py" not in named
    assert "tests/models/recsys/test_dcnv2.py" in named


def test_what_is_stated_names_what_exists():
    files = [str(path.relative_to(affected.ROOT)) for path in affected.ROOT.rglob("*.py")]
    modules = [affected.module_of(file) for file in files if file.startswith("scalejax/")]
    for pattern, names in affected.STATED.items():
        assert any(affected.fnmatch.fnmatch(file, pattern) for file in files), pattern
        for name in names:
            assert affected.fnmatch.filter(modules, name), name
    for pattern in affected.BY_NAME:
        assert affected.fnmatch.filter(modules, pattern), pattern
    for pattern in (pattern for patterns in affected.READ.values() for pattern in patterns):
        assert any(affected.fnmatch.fnmatch(file, pattern) for file in files), pattern


@pytest.mark.slow
def test_the_tests_of_every_planted_fault_are_named():
    assert faults.not_reached(list(faults.read_faults().values())) == []


@pytest.mark.slow
def test_a_new_optimizer_reaches_no_other_tests_than_its_own():
    init = "scalejax/optim/__init__.py"
    text = (affected.ROOT / init).read_text()
    line = "from scalejax.optim.adan import Adan as Adan\n"
    changes = {"scalejax/optim/adan.py": (None, "class Adan: ...\n"), init: (text, text + line)}
    readers = {"tests/test_affected.py", "tests/test_faults.py", "tests/test_package.py", "tests/test_vocabulary.py"}
    assert set(affected.tests_of(changes)) == readers


def test_a_base_or_checkout_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert affected.main(["main"]) == 2
    assert "no checkout of git" in capsys.readouterr().err
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    assert affected.main(["nothing"]) == 2
    assert "BASE 'nothing' is no commit here" in capsys.readouterr().err
    (tmp_path / "new.py").write_text("2")
    (tmp_path / "file").write_text("2")
    (tmp_path / "code.py").write_text("2")
    assert affected.changed("HEAD") == {"file": (None, None), "code.py": ("1", "2"), "new.py": (None, "2")}
