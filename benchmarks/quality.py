"""Test quality of tuned click models over five seeds, with paired differences and their intervals.

python benchmarks/quality.py --runs FILE --predictions FOLDER                     # the random split of the flights
python benchmarks/quality.py --runs FILE --predictions FOLDER --split time --forms DCNv2 "cross + FM"
python benchmarks/quality.py --runs FILE --times                                  # ms a step, on a quiet machine
python benchmarks/quality.py --runs FILE --report --against "cross + FM" > table.md

FILE holds the trials of `tune.py`, whose best setting of each form by validation is run here with seeds that the trials
did not use. A seed changes parameters and the order of training, never the split; boosting does not depend on it and
runs once. Differences to one form are paired by seed, and their 95 % intervals are of a bootstrap over seeds *and* test
examples (`train/metrics/bootstrap.py`): a form is called better or worse only where its interval excludes 0. Five seeds
resolve some .001 of AUC. FOLDER keeps the predictions of every run until all seeds of a form are done; then their
metrics on 1,000 resamples go to `results/click_resamples`, and a report needs nothing else.
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import sys
import zlib

import numpy as np
import tune
from scipy import stats

from scalejax.bench import harness, machine, training_step
from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import expand_batch
from scalejax.data.examples.schema import Schema
from scalejax.train.metrics import bootstrap

SEEDS = (1, 2, 3, 4, 5)
RESAMPLES = pathlib.Path(__file__).parent / "results" / "click_resamples"


def _name(form: str, split: str) -> str:
    return f"{form.replace(' ', '_').replace(',', '')}-{split}"


def seeds_of(form: str) -> tuple[int, ...]:
    """Those of a form's runs."""
    return SEEDS[:1] if form == "gradient boosting" else SEEDS


def run(runs: tune.Runs, folder: pathlib.Path, form: str, split: str) -> None:
    """All seeds of a form, those that are there left out, and their metrics on resamples."""
    setting = tune.chosen(runs, form, split)
    if setting is None:
        sys.exit(f"quality.py: not all settings of {form!r} were tried; run tune.py --forms {form!r} first.")
    done = all(runs.find(setting, split, seed, "test") for seed in seeds_of(form))
    if done and resamples_file(form, split).exists():
        return
    paths = [folder / f"{_name(form, split)}-{seed}.npz" for seed in seeds_of(form)]
    for seed, path in zip(seeds_of(form), paths, strict=True):
        found = runs.find(setting, split, seed, "test")
        if path.exists() and found:
            continue
        figures, scored = tune.scored_run(setting, split, seed, "test")
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, labels=scored.labels.astype(np.uint8), predictions=scored.predictions)
        if not found:
            runs.add(setting, split, seed, "test", figures)
        print(f"{form} {split} seed {seed}: {figures}", file=sys.stderr, flush=True)
    keep_resamples(paths, form, split)


def resamples_file(form: str, split: str) -> pathlib.Path:
    """Where the metrics of a form on resamples are."""
    return RESAMPLES / f"{_name(form, split)}.npz"


def keep_resamples(paths: list[pathlib.Path], form: str, split: str) -> None:
    """Metrics on resamples of the predictions of all seeds; boosting's one run stands for all."""
    found = [np.load(path) for path in paths]
    labels = found[0]["labels"][:, 0]
    if any((arrays["labels"][:, 0] != labels).any() for arrays in found):
        sys.exit(f"quality.py: the runs of {form!r} have different test examples; remove {paths[0].parent}.")
    predictions = [arrays["predictions"][:, 0] for arrays in found]
    whole = bootstrap.resample(labels, np.stack(predictions * (len(SEEDS) // len(predictions))))
    RESAMPLES.mkdir(exist_ok=True)
    np.savez_compressed(
        resamples_file(form, split),
        values=whole.values,
        samples=whole.samples.astype(np.float32),
        examples=whole.examples,
        labels=zlib.crc32(labels.astype(np.uint8).tobytes()),
    )


def resampled(form: str, split: str) -> tuple[int, bootstrap.Resampled] | None:
    """A checksum of the labels, and the metrics on resamples; None = runs are missing."""
    path = resamples_file(form, split)
    if not path.exists():
        return None
    with np.load(path) as kept:
        samples = kept["samples"].astype(np.float64)
        return int(kept["labels"]), bootstrap.Resampled(kept["values"], samples, len(SEEDS), int(kept["examples"]), 0)


def time(runs: tune.Runs, form: str, split: str) -> None:
    """A step of the chosen setting as `scalejax bench` times it, unless it is there or the form has no steps."""
    setting = tune.chosen(runs, form, split)
    if setting is None or form == "gradient boosting" or runs.find(setting, split, SEEDS[0], "time"):
        return
    schema, batches = _batches(split)
    contest = training_step.contest(setting.experiment(split, SEEDS[0]).model, schema, batches, None)
    seconds, _ = harness.measure(contest, harness.Effort(turns=9))
    figures = {
        "step_ms": round(1e3 * statistics.median(seconds), 1),
        "spread": round(harness.relative_spread(seconds), 3),
    }
    runs.add(setting, split, SEEDS[0], "time", figures)
    print(f"{form} {split}: {figures}", file=sys.stderr, flush=True)


@functools.cache
def _batches(split: str) -> tuple[Schema, list[ClickBatch]]:
    """The schema of a split and four of its batches."""
    data = tune.Setting(form="DLRM", shape=0, sets=()).experiment(split, SEEDS[0]).data.build()
    first = itertools.islice(data.train_batches(start_example=0), 4)
    return data.schema, [expand_batch(batch) for batch in first]


def report(runs: tune.Runs, forms: list[str], split: str, against: str) -> None:
    """The table of all forms whose runs are complete, and their differences to one of them."""
    complete = {form: found for form in forms if (found := resampled(form, split)) is not None}
    if against not in complete:
        sys.exit(f"quality.py: the runs of {against!r} on the split {split!r} are not complete.")
    other = [form for form, (labels, _) in complete.items() if labels != complete[against][0]]
    if other:
        sys.exit(f"quality.py: {', '.join(other)} have other test examples than {against}; remove their files.")
    reference = complete[against][1]
    compared = {form: bootstrap.compare_resampled(reference, found) for form, (_, found) in complete.items()}
    print(f"{machine.today()}, commit {machine.commit()}; difference: of the form from {against}\n")
    titles = ("form", "test AUC", "NE", "AUC, difference", "Mann-Whitney p", "NE, difference in %", "MFLOP")
    titles = (*titles, "dense parameters", "ms a step")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    aucs: dict[str, list[float]] = {}
    for form in (against, *(form for form in complete if form != against)):
        setting = tune.chosen(runs, form, split)
        assert setting is not None
        found = [figures for seed in seeds_of(form) if (figures := runs.find(setting, split, seed, "test"))]
        cells = [form]
        aucs[form] = [figures["auc"] for figures in found]
        for metric in ("auc", "ne"):
            values = np.array([figures[metric] for figures in found])
            cells.append(f"{values.mean():.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""))
        if form == against:
            cells += ["", "", ""]
        else:
            auc, ne = compared[form]["auc"], compared[form]["ne"]
            interval = auc.difference
            cells.append(f"{interval.value:+.4f} ({interval.low:+.4f} to {interval.high:+.4f}): {auc.verdict}")
            ranks = stats.mannwhitneyu(aucs[form], aucs[against]).pvalue if len(found) > 1 else None
            cells.append("" if ranks is None else f"{ranks:.3f}")
            low, value, high = (100 * x / ne.a for x in (ne.difference.low, ne.difference.value, ne.difference.high))
            cells.append(f"{value:+.2f} ({low:+.2f} to {high:+.2f}): {ne.verdict}")
        if "mflop" in found[0]:
            timed = runs.find(setting, split, SEEDS[0], "time")
            step = f"{timed['step_ms']:.1f}" if timed else ""
            cells += [f"{found[0]['mflop']:.2f}", f"{found[0]['dense_parameters']:,}", step]
        else:
            cells += ["", "", ""]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--predictions", metavar="FOLDER", type=pathlib.Path)
    tune.add_choice(parser)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--against", default="cross + FM", metavar="FORM")
    options = parser.parse_args()
    runs = tune.Runs(options.runs)
    if options.report:
        forms = tune.choice(options)
        forms = forms if options.against in forms else [options.against, *forms]
        return report(runs, forms, options.split, options.against)
    if not options.times and options.predictions is None:
        parser.error("give --predictions FOLDER, or --times, or --report")
    folder = pathlib.Path(options.predictions or "")
    for form in tune.choice(options):
        if options.times:
            time(runs, form, options.split)
        else:
            run(runs, folder, form, options.split)
    return None


if __name__ == "__main__":
    main()
