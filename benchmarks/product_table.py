"""Prints what the complete product of embedding tests gave, as Markdown for benchmarks/results.

    pytest tests/parallel/embedding -m "slow or not slow" --junitxml product.xml
    python benchmarks/product_table.py product.xml > benchmarks/results/embedding_product.md

Run it in the checkout and on the machine of the tests: commit and device are read here, the date from the file.
"""

import collections
import pathlib
import re
import sys
from xml.etree import ElementTree

from scalejax.bench import machine

COMMAND = 'pytest tests/parallel/embedding -m "slow or not slow" --junitxml product.xml'
_CASE = re.compile(r"test_every_kind_equals_one_device_to_the_bit\[(\w+)-(shard|copy)-([\w ]+)-(True|False)-(\d+)\]$")
_OUTCOMES = ("passed", "failed", "skipped")


def outcome(case: ElementTree.Element) -> str:
    """What became of a test case: "passed", "failed" (errors too) or "skipped"."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def markdown(report: str, commit: str, device: str) -> str:
    """The table of a JUnit report.

    Args:
      report: XML that pytest wrote.
      commit: What was tested.
      device: On what.

    Raises:
      ValueError: the report has no case of the product.
    """
    root = ElementTree.fromstring(report)
    cases = list(root.iter("testcase"))
    suite = next(root.iter("testsuite"))
    product: dict[tuple[str, str], collections.Counter] = collections.defaultdict(collections.Counter)
    others: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    devices, total = set(), collections.Counter()
    for case in cases:
        found = _CASE.match(case.get("name", ""))
        if found is None:
            others[case.get("classname", "").rpartition(".")[2]][outcome(case)] += 1
            continue
        kind, replicas, optimizer, _, count = found.groups()
        product[kind if replicas == "shard" else f"{kind}, copies", optimizer][outcome(case)] += 1
        devices.add(int(count))
        total[outcome(case)] += 1
    if not product:
        raise ValueError("the report has no case of test_every_kind_equals_one_device_to_the_bit.")
    kinds = list(dict.fromkeys(kind for kind, _ in product))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in product))
    lines = [
        "# The product of kinds, poolings, optimizers and world sizes",
        "",
        f"Two steps of every kind of sharding on {', '.join(map(str, sorted(devices)))} devices, with and without",
        "weights, against one device to the bit and against literal NumPy in float64. Every case has features of",
        "pooling sum, mean and none, of one id, several and any number, empty bags, and two features on one table.",
        "Kinds that cut columns are refused for optimizers that need norms of whole rows (-).",
        "",
        f"`{COMMAND}`",
        "",
        f"{device}, {suite.get('timestamp', '')[:10]}, commit {commit}",
        "",
        f"Of {sum(total.values())} cases {_counts(total)}; cells are passed / all.",
        "",
        "| kind | " + " | ".join(optimizers) + " |",
        "|---" * (len(optimizers) + 1) + "|",
    ]
    for kind in kinds:
        cells = [product.get((kind, optimizer)) for optimizer in optimizers]
        shown = ["-" if cell is None else f"{cell['passed']} / {sum(cell.values())}" for cell in cells]
        lines.append(f"| {kind} | " + " | ".join(shown) + " |")
    lines += ["", "The other tests of that run:", "", "| file | passed | failed | skipped |", "|---|---|---|---|"]
    lines += [f"| {file} | " + " | ".join(str(n[o]) for o in _OUTCOMES) + " |" for file, n in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _counts(total: collections.Counter) -> str:
    return ", ".join(f"{total[name]} {name}" for name in _OUTCOMES)


if __name__ == "__main__":
    import jax

    if len(sys.argv) != 2:
        sys.exit(__doc__)
    content = pathlib.Path(sys.argv[1]).read_text()
    print(markdown(content, machine.commit(), machine.device_name(jax.devices()[0])), end="")
