"""What few bits on the wire do to training: SDP4Bit piece by piece, and compressors with and without error feedback.

python benchmarks/compression_effect.py --runs FILE tune            # rates, on a seed that is not used again
python benchmarks/compression_effect.py --runs FILE run             # those that FILE has are not made again
python benchmarks/compression_effect.py --runs FILE run --studies sdp4bit --arms base qWD --seeds 1
python benchmarks/compression_effect.py --runs FILE report > table.md

    sdp4bit   a Llama of 115,000 parameters on the characters of tiny Shakespeare, 2 hosts of 4 virtual devices, ten
              seeds: quantized weights and gradients apart and together. Base and all others are the strategy `Sdp4Bit`
              with pieces left out, so that nothing else differs. One rate for all, chosen for the base.
    llama     the same model on 8 hosts of one device, three seeds: every compressor of `Ddp`, with feedback and without
    clan      the same under LANS, with signs and the largest values
    images    ResNet-8 on the bundled 5,000 pictures of Fashion-MNIST, likewise

Rates are one of four, chosen by the validation loss of a seed that is not used again, and where the lowest or the
highest is the best, others beyond it until one is worse; each arm has its own, but for `sdp4bit`, where all have that
of the base. A seed draws parameters and the order of examples anew, the same for every arm, so that differences are
taken seed by seed; intervals are of Student's t over seeds. The error of the exchange is that of the reduced gradient,
the length of what is wrong over its own, of the first step, half-way and at the end. Copies, and with them the model,
are in float32: what bfloat16 adds is the same for all arms.
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("PJRT_NPROC", "64")  # threads that may wait in exchanges

import argparse
import dataclasses
import functools
import importlib.resources
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kept_runs import KeptRuns, half_width

from scalejax import configs, optim
from scalejax.bench import machine
from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import (
    Blocks,
    Fp16,
    LinearDithering,
    NaturalDithering,
    OneBit,
    RandomKEntries,
    TopKEntries,
)
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.mesh import make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan import explain_sharding
from scalejax.plan.compiled import collectives
from scalejax.train.batches.convert import prefetch
from scalejax.train.experiment import Experiment, Gradients
from scalejax.train.runs import binding, scoring
from scalejax.train.state import TrainState
from scalejax.train.step import Program

BASE, TUNING_SEED = "base", 100
TEXT = importlib.resources.files("scalejax.data") / "bundled" / "tiny_shakespeare.txt.gz"

LLAMA = (
    "llama-shakespeare", f"data.path={TEXT}", f"data.tokenizer.path={TEXT}", "evaluation.every=0", "steps=600",
    "model.layers=2", "model.unroll=2", "model.dim=64", "model.ffn_dim=192", "model.kv_heads=4",
)  # fmt: skip
LANS = (
    "optimizer=Lans", "optimizer.learning_rate=WarmupCosine", "optimizer.learning_rate.warmup=0.03",
    "optimizer.learning_rate.final=0.1", "optimizer.b2=0.95", "optimizer.weight_decay=0.1",
)  # fmt: skip
"""But for the rate what the recipe has of AdamW."""
IMAGES = ("resnet-smoke", "data.batch_size=32", "evaluation.every=0", "evaluation.final=end", "steps=560")

PLAIN = Sdp4Bit(weights="plain", gradients="plain", param_dtype=None)
TWO_LEVEL = dataclasses.replace(PLAIN, gradients="two_level")
FACTOR = 1024.0
"""The rate of probes: a power of two, and large, so that parameters that are subtracted again round nothing away."""

PIECES = {
    BASE: PLAIN,
    "qW": dataclasses.replace(PLAIN, weights="quantized"),
    "qW, nearest": dataclasses.replace(PLAIN, weights="quantized", weight_rounding="nearest"),
    "qWD": dataclasses.replace(PLAIN, weights="differences"),
    "TLq": dataclasses.replace(TWO_LEVEL, transform="none"),
    "TLq-HS": TWO_LEVEL,
    "SDP4Bit": Sdp4Bit(param_dtype=None),
    "INT4, both hops": dataclasses.replace(TWO_LEVEL, transform="none", fast_bits=4),
}


def _compressed() -> dict[str, Any]:
    """Every compressor with and without feedback; random places with feedback are not scaled."""
    found: dict[str, Any] = {BASE: Ddp(accumulate="local")}
    for name, compressor in (
        ("float16", Fp16()),
        ("one bit", OneBit()),
        ("one bit of 128", OneBit(group=128)),
        ("top 1 %", TopKEntries(k=0.01)),
        ("random 1/32", RandomKEntries(k=1 / 32)),
        ("linear dithering", LinearDithering(levels=16)),
        ("natural dithering", NaturalDithering()),
        ("int4:128", Blocks(format="int4:128")),
    ):
        for feedback in ("none", "vanilla"):
            how = Compression(compressor=compressor, error_feedback=feedback, plain_below=0)
            found[f"{name}, {'with' if feedback != 'none' else 'no'} feedback"] = Ddp(
                accumulate="local", compression=how
            )
    return found


COMPRESSED = _compressed()
CLAN = {name: arm for name, arm in COMPRESSED.items() if name.startswith((BASE, "one bit,", "top 1 %,"))}


class Study(NamedTuple):
    """Arms that are compared.

    Attributes:
      sets: A recipe, and what is set.
      hosts: Of the eight devices.
      arms: Name -> strategy.
      rates: Peaks that are tried in any case.
      own_rates: Whether each arm has a rate of its own, or all that of the base.
      seeds: Of the runs.
      split, metric: What is scored at the end; trials always score the validation split.
    """

    sets: tuple[str, ...]
    hosts: int
    arms: dict[str, Any]
    rates: tuple[float, ...]
    own_rates: bool
    seeds: tuple[int, ...]
    split: str
    metric: str


STUDIES = {
    "sdp4bit": Study(LLAMA, 2, PIECES, (1.5e-3, 3e-3, 6e-3, 1.2e-2), False, tuple(range(1, 11)), "validation", "loss"),
    "llama": Study(LLAMA, 8, COMPRESSED, (1e-3, 3e-3, 6e-3, 1.2e-2), True, (1, 2, 3), "validation", "loss"),
    "clan": Study((*LLAMA, *LANS), 8, CLAN, (5e-3, 1e-2, 2e-2, 4e-2), True, (1, 2, 3), "validation", "loss"),
    "images": Study(IMAGES, 8, COMPRESSED, (0.01, 0.03, 0.1, 0.3), True, (1, 2, 3), "test", "loss"),
}


class Arm(NamedTuple):
    """What makes a run, but for its seed."""

    study: str
    name: str
    rate: float
    steps: int


def experiment_of(arm: Arm, seed: int = 0) -> Experiment:
    """The recipe with a strategy, a rate, and an order of the examples."""
    study = STUDIES[arm.study]
    name, *sets = study.sets
    own = (f"placement.mesh.replica={study.hosts}", f"steps={arm.steps}", f"data.seed={seed}")
    made = configs.load(name, [*sets, *own, f"optimizer.learning_rate.peak={arm.rate}"])
    return dataclasses.replace(made, strategy=study.arms[arm.name])


def _bound(experiment: Experiment) -> Program:
    mesh = make_mesh(experiment.placement.mesh, jax.devices()[:8])
    return binding.bind(experiment, experiment.data.build().schema, mesh)


class Compiled(NamedTuple):
    """An arm, compiled once for all seeds.

    Attributes:
      program: What was compiled.
      step: (state, batch) -> (state, loss); the state is donated.
      sent: Bytes that a device sends in a step: to other hosts, and within its own; the least that collectives need.
    """

    program: Program
    step: Any
    sent: dict[str, float]


@functools.cache
def compiled(arm: Arm) -> Compiled:
    program = _bound(experiment_of(arm))
    function, arguments = program.repeated_step()
    options: Any = program.compiler_options
    step = function.trace(*arguments).lower().compile(options)
    sent = collectives.sent(explain_sharding(step, program.mesh), program.mesh.shape)
    return Compiled(program, step, dataclasses.asdict(sent))


@functools.cache
def probes(arm: Arm) -> tuple[Program, Program] | None:
    """Programs whose step is the reduced gradient, by the exchange and without it; None = it travels as it is."""
    experiment = experiment_of(arm)
    strategy = experiment.strategy
    if isinstance(strategy, Sdp4Bit):
        exact = dataclasses.replace(strategy, gradients="plain")
    else:
        exact = dataclasses.replace(strategy, compression=None)
    if exact == strategy:
        return None
    descent = optim.Sgd(learning_rate=optim.Constant(value=FACTOR))
    changed = dataclasses.replace(experiment, optimizer=descent, gradients=Gradients())
    return _bound(changed), _bound(dataclasses.replace(changed, strategy=exact))


def gradient(probe: Program, state: TrainState, batch: Any) -> dict[str, jax.Array]:
    """What a step of plain descent would subtract: the reduced gradient of a state on a batch."""
    exchange = jax.tree.map(jnp.copy, state.exchange) if probe.abstract_state().exchange else {}
    own = dataclasses.replace(
        jax.tree.map(jnp.copy, dataclasses.replace(state, exchange={}, optimizer={})),
        exchange=exchange,
        optimizer=probe.transformation.init(state.params),
    )
    after, _ = probe.train_step(own, batch)
    return {path: (p - after.params[path]) / FACTOR for path, p in state.params.items()}


def error_of_exchange(pair: tuple[Program, Program], state: TrainState, batch: Any) -> float:
    """Length of what is wrong with the reduced gradient, over its own."""
    found, exact = (gradient(probe, state, batch) for probe in pair)
    missed = sum(float(((found[path] - g) ** 2).sum()) for path, g in exact.items())
    return (missed / sum(float((g**2).sum()) for g in exact.values())) ** 0.5


def scored(study: str, seed: int) -> str:
    """The split that a run is scored on."""
    return "validation" if seed == TUNING_SEED else STUDIES[study].split


def train(arm: Arm, seed: int) -> dict[str, Any]:
    """Figures of a run; trials leave the error of the exchange out."""
    own, data = compiled(arm), experiment_of(arm, seed).data.build()
    program, split = own.program, scored(arm.study, seed)
    pair = None if seed == TUNING_SEED else probes(arm)
    probed = set() if pair is None else {1, arm.steps // 2, arm.steps}
    state, errors = program.init(redraw=seed), []
    begun, cpu = time.perf_counter(), time.process_time()
    with prefetch(program.task.train_batches(data, program.mesh, 0), program) as batches:
        for step in range(1, arm.steps + 1):
            batch = next(batches)[1]
            if pair is not None and step in probed:
                errors.append(round(error_of_exchange(pair, state, batch), 4))
            state, _ = own.step(state, batch)
            jax.block_until_ready(state.params)  # virtual devices must not queue steps
    try:
        scores = scoring.score(program, state, program.task.eval_batches(data, program.mesh, split)).measure()
    except UserError as error:
        if "not finite" not in str(error):
            raise
        scores = {STUDIES[arm.study].metric: math.inf}  # it diverged: tried, but never chosen
    return {
        "scores": {name: round(float(value), 6) for name, value in scores.items() if isinstance(value, float)},
        "errors": errors,
        "sent": own.sent,
        "parameters": program.model.size,
        "wall_s": round(time.perf_counter() - begun, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def kept(runs: KeptRuns, arm: Arm, seed: int, *, make: bool) -> dict[str, Any] | None:
    """A run that FILE has, or gets now; None = it is not there."""
    key = {**arm._asdict(), "seed": seed, "scored": scored(arm.study, seed)}
    found = runs.first(key)
    if found is None and make:
        begun = time.perf_counter()
        found = key | train(arm, seed)
        runs.append(found)
        print(f"{found}, {time.perf_counter() - begun:.0f} s in all", file=sys.stderr, flush=True)
    return found


def trials(runs: KeptRuns, study: str, arm: str, steps: int, *, make: bool = False) -> dict[float, dict[str, Any]]:
    """Rate -> a run with the seed of the trials; empty where one that is wanted was not made."""
    s, found = STUDIES[study], {}
    wanted = list(s.rates)
    while wanted:
        for rate in wanted:
            run = kept(runs, Arm(study, arm, rate, steps), TUNING_SEED, make=make)
            if run is None:
                return {}
            found[rate] = run
        tried = sorted(found)
        best = min(tried, key=lambda rate: found[rate]["scores"][s.metric])
        wanted = []
        if best in (tried[0], tried[-1]):
            neighbour = tried[1] if best == tried[0] else tried[-2]
            wanted = [float(f"{best * best / neighbour:.3g}")]
    return found


def rate_of(runs: KeptRuns, study: str, arm: str, steps: int) -> float | None:
    """The rate of an arm, whose trial ended best; None = not all were made."""
    found, metric = trials(runs, study, arm if STUDIES[study].own_rates else BASE, steps), STUDIES[study].metric
    return min(found, key=lambda rate: found[rate]["scores"][metric], default=None)


def missed(study: str, shares: dict[str, list[float]]) -> list[str]:
    """Aims of a study that its arms miss.

    Args:
      study: Its name.
      shares: Arm -> of each seed the loss above that of the base, in % of it.
    """
    means = {arm: statistics.fmean(each) for arm, each in shares.items()}
    found = []
    if study == "sdp4bit":
        if "qW" in shares and min(shares["qW"]) < 5:
            found.append(f"qW is to be 5 % worse in each seed: {min(shares['qW']):+.2f} at least")
        for arm in means.keys() - {"qW", "qW, nearest"}:
            bound, width = (0.1 if arm == "qWD" else 0.5), half_width(shares[arm])
            if abs(means[arm]) + width > bound:
                found.append(f"{arm} is to lie within {bound} % of the base: {means[arm]:+.2f} +- {width:.2f}")
        return found
    for arm in ("one bit", "top 1 %"):
        without, fed_back = (means.get(f"{arm}, {how} feedback") for how in ("no", "with"))
        if without is not None and fed_back is not None and fed_back > without / 2:
            stated = f"{without:+.2f} % without, {fed_back:+.2f} with"
            found.append(f"feedback is to close half of the gap of {arm}: {stated}")
    return found


def report(runs: KeptRuns, study: str, steps: int, seeds: Sequence[int]) -> list[str]:
    """Prints the table of the arms whose seeds are complete; the aims that they miss."""
    s = STUDIES[study]
    complete: dict[str, list[dict[str, Any]]] = {}
    for arm in s.arms:
        rate = rate_of(runs, study, arm, steps)
        if rate is not None:
            found = [kept(runs, Arm(study, arm, rate, steps), seed, make=False) for seed in seeds]
            if all(found):
                complete[arm] = [run for run in found if run is not None]
    if BASE not in complete:
        print(f"## {study}\n\nThe runs of {BASE!r} are not complete.\n")
        return []
    base = complete[BASE]
    parameters = base[0]["parameters"]
    print(f"## {study}: {parameters:,} parameters, {steps} steps, {len(seeds)} seeds\n")
    titles = ("arm", "rate", f"{s.split} {s.metric}", "minus base", "% of base", "least % of a seed")
    titles = (*titles, "error of the exchange: first, half-way, last", "B a parameter between hosts", "within")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    above: dict[str, list[float]] = {}
    for arm, found in complete.items():
        values = [run["scores"][s.metric] for run in found]
        cells = [arm, f"{found[0]['rate']:g}", f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"]
        gaps = [run["scores"][s.metric] - other["scores"][s.metric] for run, other in zip(found, base, strict=True)]
        shares = [100 * gap / other["scores"][s.metric] for gap, other in zip(gaps, base, strict=True)]
        if arm != BASE:
            above[arm] = shares
        cells.append("" if arm == BASE else f"{statistics.fmean(gaps):+.4f} ± {half_width(gaps):.4f}")
        cells.append("" if arm == BASE else f"{statistics.fmean(shares):+.2f} ± {half_width(shares):.2f}")
        cells.append("" if arm == BASE else f"{min(shares):+.2f}")
        errors = zip(*(run["errors"] for run in found), strict=True)
        cells.append(", ".join(f"{statistics.fmean(each):.3f}" for each in errors))
        cells += [f"{found[0]['sent'][where] / parameters:.3f}" for where in ("between", "within")]
        print(f"| {' | '.join(cells)} |")
    print()
    return missed(study, above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "report"))
    parser.add_argument("--runs", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--studies", nargs="+", choices=tuple(STUDIES), default=tuple(STUDIES))
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="all, where none is named")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--steps", type=int, help="fewer, to see it work")
    options = parser.parse_args()
    runs = KeptRuns(options.runs)
    if options.what == "report":
        print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
    misses: list[str] = []
    for study in options.studies:
        s = STUDIES[study]
        steps = options.steps or int(next(text for text in s.sets if text.startswith("steps=")).partition("=")[2])
        arms = [arm for arm in s.arms if options.arms is None or arm in options.arms]
        if options.what == "report":
            misses += [f"{study}: {text}" for text in report(runs, study, steps, options.seeds or s.seeds)]
        elif options.what == "tune":
            for arm in arms if s.own_rates else [BASE]:
                trials(runs, study, arm, steps, make=True)
        else:
            for seed in options.seeds or s.seeds:
                for arm in arms:
                    rate = rate_of(runs, study, arm, steps)
                    if rate is None:
                        sys.exit(f"compression_effect.py: not all rates of {arm!r} in {study!r} were tried; run tune.")
                    kept(runs, Arm(study, arm, rate, steps), seed, make=True)
    if misses:
        sys.exit("\n".join(("Missed:", *misses)))


if __name__ == "__main__":
    main()
