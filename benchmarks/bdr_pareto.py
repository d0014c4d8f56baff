"""Bits against fidelity over the family of block data representations, and the QSNR of every named format.

    python benchmarks/bdr_pareto.py [--vectors 10000] [--search 400] [--markdown benchmarks/results/bdr_pareto.md]
                                    [--image docs/images/bdr_pareto.png]

Vectors of 1,024 numbers, N(0, sigma^2) with sigma ~ |N(0, 1)| for each, ties to even; `--search` of them for each point
of the family. The reference figures beside ours are those of tests/cases/format_cases.py.
"""

import argparse
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cases")]

import jax
import numpy as np
from format_cases import QSNR_TABLE, QSNR_VARIANTS

from scalejax.bench import machine
from scalejax.numerics import qsnr, search
from scalejax.numerics.formats import FORMATS, BlockFormat, find

NAMED = [name for name, format in FORMATS.items() if name not in ("int2",)]

PAGE = """\
# BDR: bits against fidelity

`python benchmarks/bdr_pareto.py --vectors {vectors} --search {search}`

{device}, {today}, commit {commit}. QSNR = -10 log10 of noise over signal, both summed over vectors of
1,024 numbers, N(0, sigma^2) with sigma ~ |N(0, 1)| for each; ties to even. Bits are those of storage, scales included.

## Every format against a reference ({vectors:,} vectors)

The reference is NumPy code that shares none with the package, with another seed. Of the paper (ISCA 2023, p. 7): MX9 is
about 3.6 dB above MSFP16; k2 from 8 to 2 gives about 2 dB, k2 from 2 to 1 0.7 dB, d2 from 1 to 2 0.5 dB.

ROWS

## The Pareto front of {members} members ({search:,} vectors)

k1 of 8 to 128, k2 of 1 to 8, d2 of 0 to 3, 1 to 8 magnitude bits (S), exponents of 8 bits; INT (I), FP8 and VSQ under
float32 scales. MX9, MX6 and MX4 lie on it, so do their like with other magnitude bits. Cost here is storage; that of
the paper is area and memory of a dot-product unit, which is not modelled.

BEST

## Named formats beside the front

BESIDE

## Other distributions, dB ({search:,} vectors, default rules)

SPREAD
"""


def draw(name: str, count: int, seed: int = 0) -> np.ndarray:
    return qsnr.DISTRIBUTIONS[name](np.random.default_rng(seed), count, 1024).astype(np.float32)


def table(vectors: np.ndarray) -> list[str]:
    """Ours beside the reference."""
    rows = ["| format | scale rule | bits | QSNR, dB | reference | difference | worst vector | theorem 1 |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    cases = [(name, rule, find(name), want) for (name, rule), want in QSNR_TABLE.items()]
    cases += [(name, None, format, want) for name, (format, want) in QSNR_VARIANTS.items()]
    for name, rule, format, want in cases:
        found = qsnr.study(format, vectors, scale_rule=rule)
        bounded = rule in (None, "floor") and format.scale == "exponent" and format.element.max_exponent == 0
        rows.append(
            f"| {name} | {rule or ('floor' if format.scale == 'exponent' else 'amax')} | {format.bits_per_element:.4g} "
            f"| {found.overall:.2f} | {want:.2f} | {found.overall - want:+.2f} | {found.lowest:.2f} "
            f"| {f'{qsnr.theorem1_bound(format, 1024):.2f}' if bounded else ''} |"
        )
    return rows


def distributions(count: int) -> list[str]:
    """Every named format under every distribution."""
    names = list(qsnr.DISTRIBUTIONS)
    rows = [f"| format | {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * (len(names) + 1) + "|"]
    drawn = {name: draw(name, count) for name in names}
    for name in NAMED:
        found = [qsnr.study(name, drawn[one]).overall for one in names]
        rows.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in found)} |")
    return rows


def numbers(format: BlockFormat) -> str:
    """k1, the kind of its scale where it is in software, k2, d2 and the element."""
    kind = "" if format.scale == "exponent" else f" {format.scale}"
    second = "" if format.sub_scale == "none" else f", k2={format.k2}, d2={format.d2}"
    return f"k1={format.k1}{kind}{second}, {format.element.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=10_000)
    parser.add_argument("--search", type=int, default=400)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--image", type=pathlib.Path)
    arguments = parser.parse_args()

    started = time.perf_counter()
    rows = table(draw("variable_gaussian", arguments.vectors))
    print("\n".join(rows), flush=True)
    few = draw("variable_gaussian", arguments.search)
    points = search.measure(search.family(), few)
    front = search.pareto(points)
    named = {point.format.name: point for point in search.measure([FORMATS[name] for name in NAMED], few)}
    best = ["| bits | QSNR, dB | format |", "|---|---|---|"]
    best += [f"| {point.bits:.4g} | {point.qsnr:.2f} | {numbers(point.format)} |" for point in front]
    beside = ["| format | bits | QSNR, dB | best of the family with as few bits | gap, dB |", "|---|---|---|---|---|"]
    for name, point in named.items():
        within = [p for p in front if p.bits <= point.bits]
        if within:
            top = within[-1]
            beside.append(
                f"| {name} | {point.bits:.4g} | {point.qsnr:.2f} | {top.qsnr:.2f} ({numbers(top.format)}) "
                f"| {top.qsnr - point.qsnr:.2f} |"
            )
    print("\n".join([*best, "", *beside]), flush=True)
    spread = distributions(arguments.search)
    took = time.perf_counter() - started
    print("\n".join(spread), f"\n{took:.0f} s")
    if arguments.image:
        picture(points, front, named, arguments.image)
    if arguments.markdown:
        sections = {"ROWS": rows, "BEST": best, "BESIDE": beside, "SPREAD": spread}
        text = PAGE.format(
            vectors=arguments.vectors,
            search=arguments.search,
            members=len(points),
            device=machine.device_name(jax.devices()[0]),
            today=machine.today(),
            commit=machine.commit(),
        )
        for mark, lines in sections.items():
            text = text.replace(mark, "\n".join(lines))
        arguments.markdown.write_text(text)


def picture(points, front, named, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot([p.bits for p in points], [p.qsnr for p in points], ".", color="0.8", markersize=3, label="family")
    axes.step([p.bits for p in front], [p.qsnr for p in front], where="post", color="0.4", label="Pareto front")
    for name, point in named.items():
        kind = "C3o" if name.startswith("bdr_") else "C0s" if name.startswith(("mx", "nv")) else "C2^"
        axes.plot(point.bits, point.qsnr, kind, markersize=5)
        left = kind.startswith("C2")
        place = {"xytext": (-5, 2) if left else (5, -6), "ha": "right" if left else "left"}
        axes.annotate(name, (point.bits, point.qsnr), fontsize=7, textcoords="offset points", **place)
    axes.set(xlim=(1.5, 12), ylim=(0, 55), xlabel="bits per element", ylabel="QSNR, dB")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
