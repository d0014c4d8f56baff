"""Hooks of mkdocs.yml: the README is the first page, and links that leave docs/ go to the repository, or are text."""

import pathlib
import posixpath
import re
import sys
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import public_address  # noqa: E402

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def relinked(markdown: str, folder: str, address: str) -> str:
    """Markdown of a file in `folder` of the repository, as a page of docs/.

    Args:
      markdown: The text.
      folder: "" for a file at the root, "docs" for a page.
      address: Of the repository, for links to what is no page; without one they become their text.
    """

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("docs/") and path.endswith(".md"):
            return f"[{text}]({path.removeprefix('docs/')}{mark}{anchor})"
        if path == "README.md":
            return f"[{text}](index.md{mark}{anchor})"
        return f"[{text}]({address}/blob/{public_address.BRANCH}/{path})" if address else text

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    found = "".join(parts)
    return found if folder else re.sub(r'(\]\(|src=")docs/', r"\1", found)


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as index.md."""
    text = relinked((ROOT / "README.md").read_text(encoding="utf-8"), "", public_address.ADDRESS)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the pages of docs/."""
    return markdown if page.file.src_uri == "index.md" else relinked(markdown, "docs", public_address.ADDRESS)
