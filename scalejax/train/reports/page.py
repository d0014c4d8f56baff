"""The HTML that carries a report: one file, no scripts, nothing loaded from elsewhere, light and dark."""

import base64
import html
from collections.abc import Iterable, Sequence

_CSS = """
:root{--ink:#1d232b;--soft:#5c6773;--line:#dfe4ea;--card:#ffffff;--ground:#f5f7f9;--accent:#2469b3;--good:#1d7d54;
--bad:#b3423f;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--soft:#98a4b1;--line:#2b333d;--card:#171c22;--ground:#0f1317;
--accent:#6cb0f5;--good:#5cc495;--bad:#f08a86}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
header h1{margin:0 0 4px;font-size:26px;letter-spacing:-.01em}
header p{margin:0;color:var(--soft)}
header p b{color:var(--ink);font-weight:600}
h2{margin:36px 0 12px;font-size:18px}
h3{margin:0 0 8px;font-size:14px;color:var(--soft);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:24px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.tile .name{color:var(--soft);font-size:12.5px}
.tile .value{font-size:24px;font-weight:650;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.tile .note{color:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
section>.card+.card{margin-top:12px}
.grid>.card{align-self:start}
figure img{display:block;width:100%;height:auto}
figcaption{color:var(--soft);font-size:12.5px;margin-top:6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:5px 8px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child{padding-left:0}
th:last-child,td:last-child{padding-right:0}
tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:500;font-size:12.5px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.dim{color:var(--soft)}
td.key{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px;white-space:nowrap}
td.val{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px;overflow-wrap:anywhere}
.better{color:var(--good);font-weight:600}.worse{color:var(--bad);font-weight:600}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;margin-top:12px}
summary{cursor:pointer;font-weight:600;font-size:14px}
details>*:not(summary){margin-top:10px}
pre{overflow-x:auto;font-size:12.5px;white-space:pre-wrap;margin:0}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
footer{margin-top:40px;color:var(--soft);font-size:12.5px}
@media(max-width:600px){main{padding:20px 12px 40px}figure,.card,details{padding:10px 12px}table{font-size:13px}
th,td{padding:4px 5px}td.n,th.n,td.key{white-space:normal}td.key{overflow-wrap:anywhere}td.val{min-width:40%}}
@media print{body{background:#fff}figure,.card,.tile{break-inside:avoid}}
"""

Cell = str | tuple[str, str]
"""A text, or a text and the CSS classes of its cell: n (number), dim (minor), better, worse, key, val."""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page; `body` holds HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def header(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """The title, and below it names with values in one line."""
    line = " &nbsp;·&nbsp; ".join(f"{text(name)} <b>{text(value)}</b>" for name, value in facts)
    return f"<header><h1>{text(title)}</h1><p>{line}</p></header>"


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: name, value and a note each."""
    cells = "".join(
        f'<div class="tile"><div class="name">{text(name)}</div><div class="value">{text(value)}</div>'
        f'<div class="note">{text(note)}</div></div>'
        for name, value, note in items
    )
    return f'<div class="tiles">{cells}</div>'


def section(title: str, *content: str) -> str:
    """A heading and what belongs to it; nothing if there is no content."""
    present = [part for part in content if part]
    return f"<section><h2>{text(title)}</h2>\n" + "\n".join(present) + "</section>" if present else ""


def grid(parts: Iterable[str]) -> str:
    """Pictures or cards side by side where there is room."""
    joined = "\n".join(part for part in parts if part)
    return f'<div class="grid">{joined}</div>' if joined else ""


def picture(svg: str, alt: str, caption: str) -> str:
    """An SVG as a picture inside the file, with a caption."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure><img alt="{text(alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def card(title: str, content: str) -> str:
    """A framed block."""
    return f'<div class="card"><h3>{text(title)}</h3>{content}</div>'


def table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; an empty head is left out, and so are columns that are empty in every row. Wide ones scroll."""
    rows = list(rows)
    used = {i for row in rows for i, cell in enumerate(row) if _split(cell)[0]}
    head = [cell for i, cell in enumerate(head) if i == 0 or i in used]
    rows = [[cell for i, cell in enumerate(row) if i == 0 or i in used] for row in rows]
    top = f"<thead><tr>{''.join(_cell('th', c) for c in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(_cell('td', c) for c in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def details(title: str, content: str) -> str:
    """A block that opens on click."""
    return f"<details><summary>{text(title)}</summary><div>{content}</div></details>"


def paragraph(content: str) -> str:
    """Text in a paragraph."""
    return f"<p>{text(content)}</p>"


def text(content: str) -> str:
    """Escapes what HTML would read as markup."""
    return html.escape(content, quote=True)


def _split(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def _cell(tag: str, cell: Cell) -> str:
    content, kind = _split(cell)
    return f'<{tag} class="{kind}">{text(content)}</{tag}>' if kind else f"<{tag}>{text(content)}</{tag}>"
