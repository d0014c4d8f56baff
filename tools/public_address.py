"""The public address of the repository, and what is made from it: badges in notebooks and `[project.urls]`.

    python tools/public_address.py       writes both; without an address it takes both away

There is none yet: set ADDRESS when there is.
"""

import json
import pathlib
import re

ADDRESS = ""
"""Such as "https://github.com/OWNER/scalejax"."""

BRANCH = "main"
ROOT = pathlib.Path(__file__).parent.parent
_BADGE = re.compile(r"\[!\[Open in Colab\][^\n]*\n\n")
_URLS = re.compile(r"\[project\.urls\]\n(?:.+\n)*\n")


def badge(address: str, notebook: str) -> str:
    """The line that opens a notebook in Colab; nothing without an address."""
    path = address.removeprefix("https://github.com/")
    if not address:
        return ""
    link = f"https://colab.research.google.com/github/{path}/blob/{BRANCH}/notebooks/{notebook}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})\n\n"


def urls(address: str) -> str:
    """The table of addresses of a package; nothing without an address."""
    if not address:
        return ""
    lines = {
        "Repository": address,
        "Documentation": f"{address}/tree/{BRANCH}/docs",
        "Changelog": f"{address}/blob/{BRANCH}/CHANGELOG.md",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{link}"\n' for name, link in lines.items()) + "\n"


def write(root: pathlib.Path, address: str) -> None:
    """Writes what is made from an address into the notebooks and the pyproject.toml of a checkout."""
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first = notebook["cells"][0]
        text = badge(address, path.name) + _BADGE.sub("", "".join(first["source"]))
        first["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    project = root / "pyproject.toml"
    text = _URLS.sub("", project.read_text(encoding="utf-8"))
    project.write_text(text.replace("[project.scripts]\n", f"{urls(address)}[project.scripts]\n"), encoding="utf-8")


if __name__ == "__main__":
    write(ROOT, ADDRESS)
