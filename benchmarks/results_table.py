"""Prints the results of `scalejax bench ... --json FILE` as Markdown, for a file in benchmarks/results.

python benchmarks/results_table.py "scalejax bench wukong_step --against torch" wukong_step.json
"""

import pathlib
import sys

from scalejax.bench import output

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    command, *files = sys.argv[1:]
    results = [result for file in files for result in output.from_json(pathlib.Path(file).read_text())]
    print(output.markdown(results, command), end="")
