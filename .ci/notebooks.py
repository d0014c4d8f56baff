"""Executes every notebook with tiny settings and fails on the first cell that raises."""

import pathlib
import sys
import time

import nbclient
import nbformat

for path in sorted(pathlib.Path("notebooks").glob("*.ipynb")):
    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"{path}: {cells} cells in {time.monotonic() - start:.0f} s")
    if not cells:
        sys.exit(f"{path}: no code cells")
