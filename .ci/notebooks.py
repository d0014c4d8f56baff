"""Executes every notebook, two at a time; fails on the first cell that raises; rewrites nothing unless told to.

SCALEJAX_NOTEBOOK_SIZE=smoke python .ci/notebooks.py              what CI does
SCALEJAX_NOTEBOOK_SIZE=smoke python .ci/notebooks.py --store      also stores the outputs, which readers see
"""

import concurrent.futures
import pathlib
import sys
import time

import nbclient
import nbformat

AT_A_TIME = 2
"""Each has a kernel of its own, and much of what it does is compiled by one thread."""


def execute(path: pathlib.Path) -> None:
    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    print(f"{path}: {len(code)} cells in {time.monotonic() - start:.0f} s", flush=True)
    if not code:
        raise ValueError(f"{path}: no code cells")
    if "--store" in sys.argv[1:]:
        for cell in code:  # warnings and progress name paths of the machine
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)


# The largest first, so that the last to end is a short one.
paths = sorted(pathlib.Path("notebooks").glob("*.ipynb"), key=lambda path: -path.stat().st_size)
pool = concurrent.futures.ThreadPoolExecutor(AT_A_TIME)
runs = [pool.submit(execute, path) for path in paths]
try:
    for run in concurrent.futures.as_completed(runs):
        run.result()
finally:
    pool.shutdown(cancel_futures=True)
