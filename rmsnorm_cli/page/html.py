"""HTML for the page: escaped by default, self-contained, light and dark, readable on a phone; no script."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rmsnorm_cli.results import Table


class Markup(str):
    """Text that is HTML already; every other text is escaped."""

    __slots__ = ()


STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #5a6470; --line: #d9dee4; --panel: #f5f7f9;
  --good: #116b39; --bad: #b3261e; --other: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --ink: #e4e8ec; --soft: #9aa5b1; --line: #333a42;
  --panel: #1d2227; --good: #58c98a; --bad: #ff8a80; --other: #e5b567 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p, ul { margin: .5rem 0; max-width: 44rem } ul { padding-left: 1.2rem }
a { color: inherit }
nav ul { list-style: none; padding: 0 }
code { font: .9em ui-monospace, "DejaVu Sans Mono", monospace; background: var(--panel); padding: .1em .3em }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem 2rem }
figure { margin: 1rem 0; max-width: 36rem } figure svg { display: block; width: 100%; height: auto }
figcaption, .soft { color: var(--soft); font-size: .875rem }
.scroll { overflow-x: auto; margin: .75rem 0; border: 1px solid var(--line); border-radius: .4rem }
.scroll:focus-visible { outline: 2px solid var(--soft) }
table { border-collapse: collapse; font-size: .875rem; min-width: 100% }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; overflow-wrap: normal }
th { background: var(--panel); font-weight: 600; min-width: 4.2rem } tbody tr:last-child td { border-bottom: 0 }
td:not(.wide) { white-space: nowrap } td.wide { min-width: 13rem }
tbody td:first-child { position: sticky; left: 0; background: var(--ground); font-weight: 600; max-width: 40vw;
  min-width: 5.5rem; white-space: normal; overflow-wrap: break-word }
@media (min-width: 48rem) { tbody td:first-child:not(.wide) { white-space: nowrap } }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0 }
dt { color: var(--soft) } dd { margin: 0 }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .75rem 0; padding: .25rem .75rem }
summary { cursor: pointer; font-weight: 600; padding: .25rem 0 }
.status { font-weight: 700 } .passed { color: var(--good) } .failed, .error { color: var(--bad) }
.refused, .inconclusive, .interrupted, .running { color: var(--other) }
@media print { .scroll { overflow: visible } details > * { display: block } }
"""
WORDS = ("passed", "failed", "error", "refused", "inconclusive", "interrupted", "running")
WIDE = 28  # characters from which a cell asks for room of its own


def element(name: str, content: str | Iterable[str] = "", **attributes: str) -> Markup:
    """Return an element; content that is not Markup is escaped, `class_` is the attribute class."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    parts = [content] if isinstance(content, str) else content
    return Markup(f"<{name}{given}>{''.join(text(part) for part in parts)}</{name}>")


def text(content: str) -> Markup:
    """Return content as HTML, escaped unless it is Markup."""
    return content if isinstance(content, Markup) else Markup(escape(content))


def table(made: Table) -> Markup:
    """Return a table that scrolls sideways by itself, its first column in place."""
    head = element("thead", [element("tr", [element("th", name, scope="col") for name in made.columns])])
    rows = [element("tr", [_cell(cell) for cell in row]) for row in made.rows]
    inner = element("table", [head, element("tbody", rows)])
    return Markup(scrolling(inner, made.title) + (element("p", made.caption, class_="soft") if made.caption else ""))


def scrolling(inner: Markup, label: str) -> Markup:
    """Return what may be wider than the page, in a box that scrolls by itself."""
    return element("div", [inner], class_="scroll", tabindex="0", role="region", aria_label=label)


def _cell(content: str) -> Markup:
    word, colon, rest = content.partition(":")
    inside = [element("span", word, class_=f"status {word}"), _text(colon + rest)] if word in WORDS else _text(content)
    return element("td", inside, class_="wide") if len(content) > WIDE else element("td", inside)


def _text(content: str) -> Markup:
    """Escape text that may be broken into lines behind a slash, as the names of cases and files have many."""
    return Markup(escape(content).replace("/", "/<wbr>"))


def facts(values: Mapping[str, str]) -> Markup:
    """Return a list of names and values; empty values are left out."""
    pairs = [(element("dt", name), element("dd", value)) for name, value in values.items() if value]
    return element("dl", [part for pair in pairs for part in pair])


def bullets(lines: Sequence[str]) -> Markup:
    """Return a bulleted list; what stands between backticks is set as code."""
    return element("ul", [element("li", _with_code(line)) for line in lines])


def _with_code(line: str) -> list[str]:
    return [element("code", part) if i % 2 else part for i, part in enumerate(line.split("`"))]


def folded(summary: str, content: Iterable[str], *, shown: bool = False) -> Markup:
    """Return a part that opens at a click."""
    attributes = {"open": "open"} if shown else {}
    return element("details", [element("summary", summary), *content], **attributes)


def picture(svg: str, caption: str) -> Markup:
    """Return a figure with an inline SVG."""
    described = Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1))
    return element("figure", [described, element("figcaption", caption)])


def document(title: str, parts: Iterable[str]) -> str:
    """Return the whole page."""
    body = "".join(text(part) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
