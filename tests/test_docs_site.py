"""The documents as a site: links out of docs/ lead somewhere or are text, and pages ask no other server."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def docs_site(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("docs_site")


@pytest.mark.parametrize(
    ("markdown", "folder", "without", "with_address"),
    [
        ("[a](training.md#phases)", "docs", "[a](training.md#phases)", None),
        ("[a](docs/training.md)", "", "[a](training.md)", None),
        ("[a](../README.md)", "docs", "[a](index.md)", None),
        ("[a](#here) [b](https://arxiv.org/abs/1)", "docs", "[a](#here) [b](https://arxiv.org/abs/1)", None),
        ("[`a`](../scalejax/a.py)", "docs", "`a`", "[`a`](https://x.org/me/scalejax/blob/main/scalejax/a.py)"),
        ("![a](docs/images/a.png)", "", "![a](images/a.png)", None),
        ("```\n[a](../b.py)\n```", "docs", "```\n[a](../b.py)\n```", None),
    ],
)
def test_links_of_the_repository_are_links_of_the_site(docs_site, markdown, folder, without, with_address):
    assert docs_site.relinked(markdown, folder, "") == without
    assert docs_site.relinked(markdown, folder, "https://x.org/me/scalejax") == (with_address or without)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_other_server(docs_site, tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {str(path.relative_to(tmp_path / "site")): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "api/index.html", "systems/index.html"} <= set(pages)
    assert "Trains an experiment into a run folder" in pages["api/index.html"]
    for name, page in pages.items():
        asked = re.findall(
            r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]+)|<link[^>]*stylesheet[^>]*(https?:[^"]+)', page
        )
        assert not asked, name
