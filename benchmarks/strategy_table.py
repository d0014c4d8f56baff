r"""Prints what the complete product of strategies gave, as Markdown for benchmarks/results.

    pytest tests/parallel/test_fsdp.py tests/train/strategies/test_dense_strategies.py \
        -m "slow or not slow" --junitxml out.xml
    python benchmarks/strategy_table.py out.xml > benchmarks/results/strategy_product.md

Run it in the checkout and on the machine of the tests: commit and device are read here, the date from the file.
"""

import collections
import pathlib
import re
import sys
from xml.etree import ElementTree

from product_table import outcome

from scalejax.bench import machine

FILES = "tests/parallel/test_fsdp.py tests/train/strategies/test_dense_strategies.py"
COMMAND = f'pytest {FILES} -m "slow or not slow" --junitxml out.xml'
# Function -> heading, and where its identifiers name the row and the column.
PRODUCTS = {
    "test_every_combination_equals_one_device": (
        "A Llama on 8 devices, every strategy, optimizer, way to accumulate, and mesh of replica and fsdp",
        re.compile(r"\[(?P<row>[\w ]+)-(?P<column>[\w, ]+)-(whole|in parts)-\w+\]$"),
    ),
    "test_every_strategy_composes_with_tensor_and_pipeline_parallelism": (
        "The same Llama with a tensor axis, with stages, and with both",
        re.compile(r"\[(?P<row>[\w ]+)-(whole|in parts)-(?P<column>\w+)\]$"),
    ),
    "test_equals_one_device_everywhere": (
        "A stack of residual blocks, every form, mesh, number of parts and optimizer",
        re.compile(r"\[(?P<row>\w+)-mode\d+-[\w-]+-\d-(?P<column>[\w ]+)\]$"),
    ),
    "test_equals_one_device_for_fifty_steps": (
        "The same for fifty steps, replica=2, fsdp=4",
        re.compile(r"\[(?P<row>\w+)-mode\d+-(?P<column>[\w ]+)\]$"),
    ),
}


def markdown(report: str, commit: str, device: str) -> str:
    """The tables of a JUnit report.

    Args:
      report: XML that pytest wrote.
      commit: What was tested.
      device: On what.

    Raises:
      ValueError: the report has no case of one of the products, or one that does not name its row and column.
    """
    root = ElementTree.fromstring(report)
    cells: dict[str, dict[tuple[str, str], collections.Counter]] = {name: {} for name in PRODUCTS}
    total, others = collections.Counter(), collections.Counter()
    for case in root.iter("testcase"):
        function, _, _ = case.get("name", "").partition("[")
        if function not in PRODUCTS:
            others[outcome(case)] += 1
            continue
        found = PRODUCTS[function][1].search(case.get("name", ""))
        if found is None:
            raise ValueError(f"{case.get('name')}: expected identifiers of {PRODUCTS[function][1].pattern}.")
        cell = cells[function].setdefault((found["row"], found["column"]), collections.Counter())
        cell[outcome(case)] += 1
        total[outcome(case)] += 1
    lines = [
        "# The product of strategies, forms, meshes, optimizers and ways to accumulate",
        "",
        "Training on 8 devices in float64 against one device: losses within 1e-12, parameters within 1e-9, relative.",
        "Cells are passed / all.",
        "",
        f"`{COMMAND}`",
        "",
        f"{device}, {next(root.iter('testsuite')).get('timestamp', '')[:10]}, commit {commit}",
        "",
        f"Of {sum(total.values())} cases {_counts(total)}; of the other tests of both files {_counts(others)}.",
    ]
    for function, (heading, _) in PRODUCTS.items():
        if not cells[function]:
            raise ValueError(f"the report has no case of {function}.")
        rows = list(dict.fromkeys(row for row, _ in cells[function]))
        columns = list(dict.fromkeys(column for _, column in cells[function]))
        lines += ["", f"{heading}:", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in rows:
            counts = [cells[function].get((row, column), collections.Counter()) for column in columns]
            lines.append(f"| {row} | " + " | ".join(f"{n['passed']} / {sum(n.values())}" for n in counts) + " |")
    return "\n".join(lines) + "\n"


def _counts(total: collections.Counter) -> str:
    return ", ".join(f"{total[name]} {name}" for name in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    import jax

    if len(sys.argv) != 2:
        sys.exit(__doc__)
    content = pathlib.Path(sys.argv[1]).read_text()
    print(markdown(content, machine.commit(), machine.device_name(jax.devices()[0])), end="")
