"""Eight virtual CPU devices, a compile cache inside the checkout, and strictness for every test."""

import collections
import gc
import importlib.metadata
import itertools
import os
import pathlib
import re
import sys
import time
import zlib

_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
_CACHE.mkdir(parents=True, exist_ok=True, mode=0o700)

# Before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("PJRT_NPROC", "64")  # threads that may wait in collectives: see scalejax/cli/environment.py
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
# Most of the time of tests is the compilation of programs that run for milliseconds. Without LLVM's optimisation and
# the newer emitters of fusions it takes half; XLA's own passes, whose results tests read, stay as they are. With
# XLA_FLAGS="" before the command tests compile as users do, as .ci/wheel.sh does where bits are compared.
_FAST = "--xla_backend_optimization_level=0"
_USERS = {"xla_backend_optimization_level": "3"}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones have no choice of emitters
    _FAST += " --xla_cpu_use_fusion_emitters=false --xla_llvm_disable_expensive_passes=true"
    _FAST += " --xla_cpu_parallel_codegen_split_count=1"  # the other core has tests of its own
    _USERS |= {"xla_cpu_use_fusion_emitters": "True", "xla_llvm_disable_expensive_passes": "False"}
    _USERS |= {"xla_cpu_parallel_codegen_split_count": "32"}
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # no stack of Python is written into any program
os.environ.setdefault("XLA_FLAGS", _FAST)
for _name, _value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two test processes may compile for a TPU side by side
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}.items():
    os.environ.setdefault(_name, _value)

import hypothesis
import jax
import pytest
import tiers
from jax._src import compiler

jax.config.update("jax_numpy_rank_promotion", "raise")
# Collection makes millions of objects that live on, and so do traces: walking them again and again took two thirds of
# the time of collection.
gc.disable()
# How long an example takes says how busy the machine is: hypothesis fails those above 0.2 s.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, a file stays in one process: its tests share fixtures and compiled programs. --dist says otherwise."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_addoption(parser):
    group = parser.getgroup("tiers of the tests")
    group.addoption("--part", action="append", default=[], metavar="FILE=I/N", help="of this file only a part")
    group.addoption("--store-durations", action="store_true", help="rewrite tests/durations.json")
    group.addoption("--until", type=float, metavar="TIME", help="skip what has not begun by then; status 75")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_Seconds(config))
    if config.getoption("--until"):
        config.pluginmanager.register(_CutOff())


def _parts_of(config):
    """{file: {(number of a part, number of parts)}}"""
    found = collections.defaultdict(set)
    for option in config.getoption("--part"):
        file, part, parts = re.fullmatch(r"(.+)=(\d+)/(\d+)", option).groups()
        found[file].add((int(part), int(parts)))
    return found


def pytest_collection_modifyitems(config, items):
    """Of a file with --part keeps the tests whose names have the hashes of its parts; see tests/tiers.py."""
    parts_of = _parts_of(config)
    left = []
    for item in items if parts_of else ():
        parts = parts_of.get(item.nodeid.partition("::")[0], ())
        if parts and not any(zlib.crc32(item.nodeid.encode()) % count == part for part, count in parts):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Cases that `default_cases` does not name are slow."""
    found = yield
    cases = [item for item in found if isinstance(item, pytest.Function)] if isinstance(found, list) else []
    marks = list(cases[0].iter_markers("default_cases")) if cases else []
    if marks:
        mark, *others = marks
        if others:
            raise pytest.Collector.CollectError(f"{cases[0].name}: default_cases stands {len(marks)} times")
        if not hasattr(cases[0], "callspec"):
            raise pytest.Collector.CollectError(f"{cases[0].name}: default_cases is for tests with parameters")
        quick = {case.callspec.id: case.callspec.params for case in cases if not case.get_closest_marker("slow")}
        try:
            kept = tiers.default_cases(quick, mark.args, **mark.kwargs)
        except ValueError as error:
            raise pytest.Collector.CollectError(f"{cases[0].originalname}: {error}") from None
        for case in cases:
            if case.callspec.id not in kept:
                case.add_marker(pytest.mark.slow)
    return found


_CPU = pytest.StashKey[float]()
_TIME_IS_UP = "the time of this run is up"
_between_files_s = 0.0
"""CPU seconds of what is done at the end of a file, which are none of its last test's."""


def _cpu_seconds():
    """Of this process and of the processes that it has waited for: what others do on the machine is not in it."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[_CPU] = _cpu_seconds() - _between_files_s
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", _cpu_seconds() - _between_files_s - item.stash[_CPU]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until and time.time() > until:
        pytest.skip(_TIME_IS_UP)


class _CutOff:
    """Gives a run that passed as far as it came a status of its own."""

    def __init__(self):
        self.left = 0

    def pytest_runtest_logreport(self, report):
        self.left += report.skipped and _TIME_IS_UP in str(report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.left and exitstatus == 0:
            session.exitstatus = tiers.CUT

    def pytest_terminal_summary(self, terminalreporter):
        if self.left:
            terminalreporter.line(f"cut off by time: {self.left} tests did not run")


class _Seconds:
    """Core-seconds of every test function, in the process that others report to: what took more than it may."""

    def __init__(self, config):
        self.store = config.getoption("--store-durations")
        self.full = "not slow" not in config.option.markexpr
        self.shares = {file: len(of) / max(n for _, n in of) for file, of in _parts_of(config).items()}
        self.seconds = collections.defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            file, _, test = report.nodeid.partition("::")
            function = test.partition("[")[0].rpartition("::")[2]
            marked = bool({"slow", "aot", "multiprocess"} & set(report.keywords))
            cpu_s = dict(report.user_properties).get("cpu_s", 0.0)
            self.seconds[file, function][marked] += cpu_s / self.shares.get(file, 1)

    def pytest_sessionfinish(self):
        if self.store:
            tiers.store_durations(self.seconds)

    def pytest_terminal_summary(self, terminalreporter):
        lines = {"over a second": tiers.over_a_second(self.seconds)}
        if self.seconds and not self.shares and tiers.DURATIONS.is_file():
            by_file = collections.Counter()
            for (file, _), seconds in self.seconds.items():
                by_file[file] += sum(seconds)
            known = {file: of for file, of in tiers.read_durations().items() if (tiers.ROOT / file).is_file()}
            lines["over budget"] = tiers.over_budget(by_file, self.full, known, tiers.read_budgets())
        for title, found in lines.items():
            if found:
                terminalreporter.section(title)
                for line in found:
                    terminalreporter.line(line)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What a test marked `compiled_as_users_do` compiles has XLA's own defaults in place of `_FAST`."""
    if pyfuncitem.get_closest_marker("compiled_as_users_do") is None or os.environ["XLA_FLAGS"] != _FAST:
        return (yield)
    get_compile_options = compiler.get_compile_options

    def as_users_do(*arguments, **options):
        options["env_options_overrides"] = {**_USERS, **(options.get("env_options_overrides") or {})}
        return get_compile_options(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", as_users_do)
        jax.clear_caches()  # of what other tests have compiled
        try:
            return (yield)
        finally:
            jax.clear_caches()


_OF_THE_FULL_TIER = {"aot", "multiprocess", "peers"}
"""Folders of tests that all have the mark of the same name."""


def pytest_ignore_collect(collection_path, config):
    """Folders of whose tests none would be left are not read."""
    folder = collection_path.name
    return True if folder in _OF_THE_FULL_TIER and f"not {folder}" in config.option.markexpr else None


@pytest.fixture(scope="module", autouse=True)
def _garbage_between_files():
    yield
    global _between_files_s
    begun = _cpu_seconds()
    if not _drop_programs():
        gc.collect()
        gc.freeze()
    _between_files_s += _cpu_seconds() - begun


_MAPS = pathlib.Path("/proc/self/maps")  # Linux only
_MOST_MAPS = 4_000
"""Of memory, of which a compiled program holds several. In a process that holds 2,000 programs the next one takes twice
as long as in a new process."""
_finished = itertools.count(1)


def pytest_runtest_logfinish():
    if next(_finished) % 50 == 0:
        _drop_programs()


def _drop_programs():
    """Whether there were so many that all went."""
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") < _MOST_MAPS:
        return False
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
    gc.freeze()
    return True


@pytest.fixture(scope="module", autouse=True)
def _pictures_where_tests_read_them(request):
    """Elsewhere they are empty: to draw those of every run took a tenth of the time of tests."""
    if request.path.name == "test_report.py" or "scalejax.train.loop" not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "scalejax.train.reports.figures._svg", lambda figure: '<svg xmlns="http://www.w3.org/2000/svg"></svg>'
        )
        yield


@pytest.fixture
def strict_promotion():
    """Implicit dtype promotion raises (optax itself needs the standard rules, hence a fixture)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    """64-bit types, for parity tests that must not drown in float32 rounding."""
    with jax.enable_x64(True):
        yield
