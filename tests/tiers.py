"""Runs a tier of the tests, or a shard of the full one.

    python -m tests.tiers quick                 # under 3 minutes: an oracle and a kill for each kind of system
    python -m tests.tiers default               # what `python -m pytest -n 2` runs
    python -m tests.tiers full --shard 3        # a twelfth of what the default tier leaves out
    python -m tests.tiers full --next --record --limit 480
    python -m tests.tiers peers --record        # comparisons with libraries of others (benchmarks/peers.sh)
    python -m tests.tiers due notebooks python312 documents     # prints the one whose last run is longest ago
    python -m tests.tiers record notebooks 212 passed           # appends its line
    python -m tests.tiers behind                # shards and steps without a run in the last 30 commits

What follows `--` goes to pytest. With --store-durations a run rewrites tests/durations.json, by which files are packed
into shards: the core-seconds of every test function, without and with the marks `slow`, `aot` and `multiprocess`.

A shard is made of whole files, so that fixtures and compiled programs are shared; a long file is cut by a hash of the
names of its tests, which stay where they are when others are added. Of a shard that takes longer than --limit, what has
not begun is left out: its line says "cut", and that is no failure.
"""

import argparse
import dataclasses
import datetime
import fnmatch
import json
import math
import pathlib
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
DURATIONS, RECORD = ROOT / "tests" / "durations.json", ROOT / "tests" / "full_tier.tsv"
BUDGETS, OVER_A_SECOND = ROOT / "tests" / "budgets.toml", ROOT / "tests" / "over_a_second.toml"

SHARDS = 12
LONGEST = 200.0
"""Core-seconds of a file that is not cut."""

STEPS = ("python312", "notebooks", "documents", "peers")
"""What has lines in the record beside shards."""

BEHIND = 30
"""Commits after which a shard or step is named as not having run."""

CUT = 75
"""Exit status of a pytest whose time was up before all of its tests had begun, and of which none had failed."""

FULL = "(slow or aot or multiprocess) and not peers and not gpu and not tpu"
PEERS = "tests/peers/"
PROCESSES = "tests/multiprocess/"
"""Tests that start processes of their own run one after the other."""

QUICK: tuple[str, ...] = (
    # Click models (Wukong, DLRM, DCNv2), tables (Neo-DLRM), plans (NeuroShard), repeated rows (RecD), tiers (MTrainS).
    "tests/models/recsys/test_wukong.py::test_forward_matches_a_literal_numpy_form",
    "tests/models/recsys/test_dlrm.py",
    "tests/models/recsys/test_dcnv2.py",
    "tests/models/recsys/test_towers.py::test_what_a_smaller_tower_lacks_has_no_gradient",
    "tests/parallel/embedding/test_collection.py::test_lookup_equals_numpy",
    "tests/parallel/embedding/test_collection.py::test_update_equals_numpy_and_is_equal_to_the_bit_on_any_mesh",
    "tests/parallel/embedding/test_collection.py::test_update_equals_the_dense_optimizer_in_double_precision",
    "tests/parallel/embedding/test_row_cache.py",
    "tests/parallel/planner/test_planner.py",
    "tests/data/examples/test_dedup.py",
    "tests/train/strategies/test_exchange_state.py::test_a_killed_run_goes_on_to_the_same_bits",
    # Language models: Llama 3, attention, contexts cut over devices, generation.
    "tests/models/llm/test_llama3.py::test_logits_are_those_of_transformers",
    "tests/models/llm/test_llama3.py::test_prefill_and_decode_equal_the_full_forward_pass",
    "tests/kernels/test_flash_attention.py::test_small_chunks_equal_the_reference_to_float64",
    "tests/parallel/test_context.py::test_results_and_gradients_are_those_of_dense_attention",
    "tests/inference/test_generate.py::test_greedy_tokens_are_those_of_full_forward_passes",
    "tests/train/test_dense.py::test_devices_and_parts_change_nothing_but_the_order_of_sums",
    "tests/train/test_dense.py::test_a_run_in_parts_equals_one_in_one_piece_to_the_bit",
    # Graph networks (ES-SpMM).
    "tests/kernels/test_sampled_spmm.py::test_derivatives_agree_with_finite_differences_twice",
    "tests/kernels/test_sampled_spmm.py::test_a_width_of_every_degree_is_exact",
    "tests/models/graph/test_layers.py",
    "tests/train/test_graph.py::test_eight_devices_train_as_one",
    "tests/train/test_graph.py::test_a_run_in_two_parts_ends_at_the_same_numbers",
    "tests/train/test_graph.py::test_mini_batches_in_two_parts_end_at_the_same_numbers",
    # Models of users' files, phases.
    "tests/train/test_outside.py::test_it_goes_on_to_the_same_bits_with_its_running_means",
    "tests/train/test_phases.py::test_a_run_that_is_killed_in_any_phase_goes_on_to_the_same_bits",
    # Number formats (BDR / MX, low precision).
    "tests/numerics/test_quantize.py::test_codes_scales_and_values_are_those_of_the_oracle",
    "tests/kernels/test_mx.py::test_short_scales_and_other_widths_give_the_codes_of_numerics",
    "tests/kernels/test_block_quant.py::test_bytes_are_those_of_the_oracle",
    "tests/inference/recommendation/test_low_precision.py::test_float_scores_are_those_of_pooling_by_hand",
    # Distribution: FSDP, DDP, gradients of any loss.
    "tests/parallel/test_fsdp.py::test_equals_one_device",
    "tests/parallel/test_ddp.py::test_any_buckets_and_parts_give_the_gradients_of_one_device",
    "tests/parallel/gradients/test_compute.py",
    # What all stand on.
    "tests/optim/test_optim.py",
    "tests/nn/test_linear.py",
    "tests/nn/test_norm.py",
    "tests/nn/test_layers.py",
    "tests/test_package.py",
)
"""Files, and single tests of those that take longer."""

Durations = Mapping[str, Mapping[str, Sequence[float]]]
"""File -> test function -> seconds of its unmarked cases, and of the others."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a shard has whole: a file, or one of the parts of a long one.

    Attributes:
      file: Path from the root.
      part: Number of the part, from 0.
      parts: How many there are.
      seconds: That it takes, on one core.
    """

    file: str
    part: int
    parts: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A line of `full_tier.tsv`.

    Attributes:
      part: "1", "2", ... = a shard; or one of `STEPS`.
      commit: At which it ran.
      date: On which.
      seconds: That it took.
      result: "passed", "failed", or "cut" by time with no failure until then.
    """

    part: str
    commit: str
    date: str
    seconds: int
    result: str


def read_durations(path: pathlib.Path = DURATIONS) -> Durations:
    """Empty, with a line that says why, where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        for functions in found.values():
            for unmarked, marked in functions.values():
                if not 0 <= float(unmarked) + float(marked) < math.inf:
                    raise ValueError(f"{unmarked}, {marked} are no seconds")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        print(f"{path.name} cannot be read ({error}): all files count alike. Write it with --store-durations.")
        return {}
    return found


def store_durations(measured: Mapping[tuple[str, str], Sequence[float]], path: pathlib.Path = DURATIONS) -> None:
    """Puts what a run of whole files measured in the place of what was known; functions that are gone go.

    A function that had unmarked cases and ran none of them has marks now.

    Args:
      measured: (file, test function) -> seconds of its unmarked cases, and of the others; 0 = it ran none of them.
      path: The file.
    """
    known = {file: dict(functions) for file, functions in (read_durations(path) if path.is_file() else {}).items()}
    for file in {file for file, _ in measured}:
        for function, (unmarked, marked) in known.get(file, {}).items():
            if unmarked and (file, function) not in measured:
                known[file][function] = [0.0, round(unmarked + marked, 2)]
    for (file, function), seconds in measured.items():
        functions = known.setdefault(file, {})
        before = functions.get(function, (0.0, 0.0))
        functions[function] = [
            max(0.01, round(new, 2)) if new else old for new, old in zip(seconds, before, strict=True)
        ]
    texts = sources()
    kept = {
        file: {name: seconds for name, seconds in sorted(known[file].items()) if name in functions_of(texts[file])}
        for file in sorted(known)
        if file in texts
    }
    lines = [f"{json.dumps(file)}: {json.dumps(functions)}" for file, functions in kept.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def functions_of(source: str) -> set[str]:
    """Names of the test functions of a file."""
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE))


def default_seconds() -> dict[str, float]:
    """File -> core-seconds of its tests in the default tier."""
    return {file: sum(seconds[0] for seconds in of.values()) for file, of in read_durations().items()}


def seconds_of(file: str, source: str, durations: Durations) -> float | None:
    """Core-seconds that the full tier adds for a file; None where no function of it was ever measured.

    Functions that were not, in a file that was, count as the mean of the others.
    """
    known = durations.get(file, {})
    functions = functions_of(source)
    measured = [known[name][1] for name in functions if sum(known.get(name, ())) > 0]
    return sum(measured) / len(measured) * len(functions) if measured else None


def units(sources: Mapping[str, str], durations: Durations) -> list[Unit]:
    """The units of all files, by path; files that were never measured count as the mean of the others."""
    found = {file: seconds_of(file, source, durations) for file, source in sources.items()}
    measured = [seconds for seconds in found.values() if seconds is not None]
    usual = sum(measured) / len(measured) if measured else 1.0
    result = []
    for file in sorted(found):
        seconds = found[file]
        seconds = usual if seconds is None else seconds
        parts = max(1, math.ceil(seconds / LONGEST))
        result += [Unit(file, part, parts, seconds / parts) for part in range(parts)]
    return result


def read_over_a_second(path: pathlib.Path = OVER_A_SECOND) -> dict[str, str]:
    """`file::function` -> why it is in the default tier though it takes over a second."""
    return {name: why for of in tomllib.loads(path.read_text()).values() for name, why in of.items()}


def over_a_second(measured: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """A line for every function of the default tier that took over a second and may not, the longest first.

    Args:
      measured: (file, test function) -> core-seconds of its unmarked cases, and of the others.
    """
    allowed = read_over_a_second()
    found = {f"{file}::{name}": unmarked for (file, name), (unmarked, _) in measured.items() if unmarked > 1}
    return [
        f"{seconds:6.1f} s  {name}"
        for name, seconds in sorted(found.items(), key=lambda t: -t[1])
        if name not in allowed
    ]


def default_cases(
    cases: Mapping[str, Mapping[str, object]], patterns: Sequence[str], first: int | None = None
) -> set[str]:
    """Names of the cases of a test that run by default.

    Args:
      cases: Name -> parameter -> value.
      patterns: Of names; none = so many cases that every value of every parameter has one.
      first: Or as many of the cases, as they stand.

    Raises:
      ValueError: no case has a name that fits a pattern.
    """
    if first is not None:
        if patterns or not 0 < first < len(cases):
            raise ValueError(f"first={first} must be alone, and less than the number of cases, {len(cases)}")
        return set(list(cases)[:first])
    fits = {pattern: set(fnmatch.filter(cases, pattern)) for pattern in patterns}
    for pattern, found in fits.items():
        if not found:
            raise ValueError(f"no case is named {pattern!r}, of {', '.join(cases)}")
    if patterns:
        return set().union(*fits.values())
    values = {name: {(key, repr(value)) for key, value in of.items()} for name, of in cases.items()}
    missing, kept = set().union(*values.values()), set()
    while missing:
        best = max(values, key=lambda name: len(values[name] & missing))
        kept.add(best)
        missing -= values[best]
    return kept


def pack(pieces: Sequence[Unit], shards: int = SHARDS) -> list[list[Unit]]:
    """The longest first, each to the shard that has least."""
    found: list[list[Unit]] = [[] for _ in range(shards)]
    totals = [0.0] * shards
    for unit in sorted(pieces, key=lambda unit: (-unit.seconds, unit.file, unit.part)):
        least = totals.index(min(totals))
        found[least].append(unit)
        totals[least] += unit.seconds
    return [sorted(shard, key=lambda unit: (unit.file, unit.part)) for shard in found]


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the tests of a system may take.

    Attributes:
      files: Patterns of paths from `tests`; none = what no other system has.
      default: Seconds on one core, in the default tier.
      full: The same in the full one.
    """

    files: tuple[str, ...]
    default: float
    full: float


def read_budgets(path: pathlib.Path = BUDGETS) -> dict[str, Budget]:
    """System -> its budget; none, with a line that says why, where the table is missing or damaged."""
    try:
        found = tomllib.loads(path.read_text())
        return {name: Budget(tuple(own["files"]), own["default"], own["full"]) for name, own in found.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"{path.name} cannot be read ({error!r}): no system has a budget.")
        return {}


def systems_of(file: str, budgets: Mapping[str, Budget]) -> list[str]:
    """The systems that a file of tests belongs to; one, if the table is right."""
    path = file.removeprefix("tests/")
    named = [system for system, own in budgets.items() if any(fnmatch.fnmatchcase(path, p) for p in own.files)]
    return named or [system for system, own in budgets.items() if not own.files]


def over_budget(
    measured: Mapping[str, float], full: bool, durations: Durations, budgets: Mapping[str, Budget]
) -> list[str]:
    """A line for every system that took more than it may, if all of its files ran that have tests in the tier.

    Args:
      measured: File -> seconds of what ran of it.
      full: The full tier ran, not the default one.
      durations: Which files have tests in the tier.
      budgets: The table.
    """
    wanted: dict[str, set[str]] = {system: set() for system in budgets}
    if not budgets:
        return []
    for file, functions in durations.items():
        if any(sum(seconds) if full else seconds[0] for seconds in functions.values()):
            wanted[systems_of(file, budgets)[0]].add(file)
    lines = []
    for system, budget in budgets.items():
        took = sum(seconds for file, seconds in measured.items() if system in systems_of(file, budgets))
        allowed = budget.full if full else budget.default
        if wanted[system] and wanted[system] <= measured.keys() and took > allowed:
            lines.append(f"{system}: {took:.0f} s of {allowed:.0f} s ({BUDGETS.name})")
    return lines


def parts() -> list[str]:
    """All that has lines in the record."""
    return [*(str(number) for number in range(1, SHARDS + 1)), *STEPS]


def read_record(path: pathlib.Path = RECORD) -> list[Run]:
    """The runs of shards and steps, in order."""
    lines, runs = path.read_text().splitlines()[1:] if path.is_file() else [], []
    for number, line in enumerate(lines, 2):
        try:
            part, commit, date, seconds, result = line.split("\t")
            if part not in parts() or result not in ("passed", "failed", "cut"):
                raise ValueError(f"{part}, {result}")
            runs.append(Run(part, commit, str(datetime.date.fromisoformat(date)), int(seconds), result))
        except ValueError as error:
            if line.strip():
                print(f"{path.name}, line {number} is no run of a shard or step ({error}): it does not count.")
    return runs


def ages(runs: Sequence[Run], history: Sequence[str], of: Sequence[str]) -> dict[str, int | None]:
    """How many commits ago each part ran; None = never, or at a commit that is not in the history.

    Args:
      runs: In order.
      history: Commits, the newest first.
      of: The parts.
    """
    place = {commit: number for number, commit in enumerate(history)}
    last = {run.part: place[run.commit] for run in runs if run.commit in place}
    return {part: last.get(part) for part in of}


def due(runs: Sequence[Run], history: Sequence[str], today: datetime.date, of: Sequence[str]) -> str:
    """The part that ran longest ago, or never.

    Where lines were lost, because nobody committed what runs had appended, it would be the same one every time. So it
    moves on by one for every day since the last line that is known, and by one for every commit where none is.
    """
    found = ages(runs, history, of)
    order = sorted(of, key=lambda part: (found[part] is not None, -(found[part] or 0), of.index(part)))
    known = [run for run in runs if run.commit in set(history) and run.part in of]
    ahead = (today - datetime.date.fromisoformat(known[-1].date)).days if known else len(history)
    return order[max(0, ahead) % len(order)]


def record(run: Run) -> None:
    """Appends a line, or says that it cannot."""
    line = "\t".join(map(str, dataclasses.astuple(run)))
    print(f"full tier: {line}")
    try:
        with RECORD.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        print(f"{RECORD.name} cannot be written ({error.strerror}): add the line above to it.")


def history() -> list[str]:
    """Commits from the newest on; empty outside of a git checkout."""
    try:
        listed = subprocess.run(["git", "log", "--format=%h", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git
        return []
    return listed.stdout.split()


def sources() -> dict[str, str]:
    """Path from the root -> text of each file of tests."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def pytest(arguments: Sequence[str]) -> int:
    """Exit status of pytest; no tests in what was named is fine."""
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], cwd=ROOT)
    return 0 if status.returncode == 5 else status.returncode


def run_shard(shard: Collection[Unit], options: Sequence[str]) -> int:
    """Exit status: that of the first pytest that failed, `CUT` if one was cut off by time, or 0."""
    found = []
    for processes in (False, True):
        chosen = [unit for unit in shard if unit.file.startswith(PROCESSES) == processes]
        if not chosen:
            continue
        files = list(dict.fromkeys(unit.file for unit in chosen))
        cut = [f"--part={unit.file}={unit.part}/{unit.parts}" for unit in chosen if unit.parts > 1]
        side_by_side = [] if processes else ["-n", "2"]
        found.append(pytest(["-m", FULL, *side_by_side, *cut, *options, *files]))
    return next((status for status in found if status not in (0, CUT)), max(found, default=0))


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m tests.tiers", description="Runs a tier of the tests, or a shard of the full one."
    )
    tier = found.add_subparsers(dest="tier", required=True)
    for name in ("quick", "default", "full", "peers"):
        one = tier.add_parser(name)
        one.add_argument("--store-durations", action="store_true", help="rewrite tests/durations.json")
        if name in ("full", "peers"):
            one.add_argument("--record", action="store_true", help="append the result to tests/full_tier.tsv")
        if name == "full":
            which = one.add_mutually_exclusive_group(required=True)
            which.add_argument("--shard", type=int, choices=range(1, SHARDS + 1))
            which.add_argument("--next", action="store_true", help="the shard that ran longest ago")
            one.add_argument("--limit", type=float, metavar="SECONDS", help="from which on no test begins")
    one = tier.add_parser("due", help="print which of some parts ran longest ago")
    one.add_argument("parts", nargs="+", choices=parts(), metavar="PART")
    one = tier.add_parser("record", help="append the line of a step to tests/full_tier.tsv")
    one.add_argument("part", choices=STEPS)
    one.add_argument("seconds", type=int)
    one.add_argument("result", choices=("passed", "failed", "cut"))
    tier.add_parser("behind", help="print the parts that have not run for long")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, that of pytest, or 2 for wrong arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    chosen = parser().parse_args(own)
    commits, today = history(), datetime.datetime.now(datetime.UTC).date()
    if chosen.tier == "behind":
        late = [part for part, age in ages(read_record(), commits, parts()).items() if age is None or age > BEHIND]
        print("full tier: " + (f"not run in the last {BEHIND} commits: {', '.join(late)}" if late else "ok"))
        return 0
    if chosen.tier == "due":
        print(due(read_record(), commits, today, chosen.parts))
        return 0
    commit = commits[0] if commits else "unknown"
    if chosen.tier == "record":
        record(Run(chosen.part, commit, str(today), chosen.seconds, chosen.result))
        return 0
    if chosen.store_durations:
        options = ["--store-durations", *options]
    if chosen.tier == "quick":
        return pytest(["-n", "2", *options, *QUICK])
    if chosen.tier == "default":
        return pytest(["-n", "2", *options])
    begun = time.monotonic()
    if chosen.tier == "peers":
        part, status = "peers", pytest(["-m", "peers", *options, PEERS])
    else:
        shards = [str(number) for number in range(1, SHARDS + 1)]
        part = str(chosen.shard or due(read_record(), commits, today, shards))
        texts = {file: text for file, text in sources().items() if not file.startswith(PEERS)}
        shard = pack(units(texts, read_durations()))[int(part) - 1]
        print(f"full tier, shard {part} of {SHARDS}: {len(shard)} files or parts of files", flush=True)
        if chosen.limit:
            options = [f"--until={time.time() + chosen.limit}", *options]
        status = run_shard(shard, options)
    result = "passed" if status == 0 else "cut" if status == CUT else "failed"
    run = Run(part, commit, str(today), round(time.monotonic() - begun), result)
    if chosen.record:
        record(run)
    else:
        print("\t".join(map(str, dataclasses.astuple(run))))
    return 0 if status == CUT else status


if __name__ == "__main__":
    sys.exit(main())
