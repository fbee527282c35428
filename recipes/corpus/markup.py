"""HTML, XML, POD, Info and reStructuredText to plain text, with paragraphs parted by blank lines."""

from __future__ import annotations

import re
from html.parser import HTMLParser


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_BLOCK = _names(
    "p div br h1 h2 h3 h4 h5 h6 li ul ol dl dt dd tr table section article blockquote pre title item "
    "steps screen figure caption note header main hr info desc listing media"
)
_SKIP = _names("script style nav head footer button form svg info links aside noscript")
_VOID = _names("br hr img link meta input area base col wbr")
_RST_DIRECTIVE = re.compile(
    r"(?m)^\.\. (SPDX|_[^\n]*:|toctree|contents|include|index|only|kernel-doc|meta)[^\n]*\n"
    r"(?:[ \t]+[^\n]*\n|\n(?=[ \t]))*"
)
_CHROME = re.compile(
    r"nav|sphinxsidebar|related|footer|header\b|breadcrumb|toc\b|menu|fancy|searchbox|headerlink", re.I
)


class _Text(HTMLParser):
    """Collects visible text; text inside <pre> keeps its layout, all other white space collapses."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skip: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            if tag in _BLOCK and not self._skip:
                self.parts.append("\n")
            return
        marks = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        if self._skip:
            if tag == self._skip[0]:
                self._skip.append(tag)
            return
        if tag in _SKIP or (tag in ("div", "table", "ul", "p", "a", "span") and _CHROME.search(marks)):
            self._skip.append(tag)
            return
        self._open(tag)

    def _open(self, tag: str) -> None:
        if tag in ("pre", "screen"):
            self._pre += 1
        if tag in ("td", "th"):
            self.parts.append("  ")
        elif tag in _BLOCK:
            self.parts.append("\n\n" if tag not in ("li", "dd", "tr", "br", "item") else "\n")
            if tag in ("li", "item"):
                self.parts.append("- ")

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            if tag == self._skip[0]:
                self._skip.pop()
            return
        if tag in ("pre", "screen"):
            self._pre = max(0, self._pre - 1)
        if tag in _BLOCK and tag not in _VOID:
            self.parts.append("\n" if tag in ("li", "dd", "tr", "dt", "item") else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def html_to_text(source: str) -> str:
    """Visible text of an HTML or Mallard page."""
    parser = _Text()
    body = re.search(r"<body.*", source, re.S | re.I)
    parser.feed(body.group(0) if body else source)
    text = "".join(parser.parts)
    text = re.sub(r"\n *- *\n+", "\n- ", text)
    return re.sub(r" *\n +(?=[^ ])", "\n", text) if "<pre" not in source else text


def pod_to_text(source: str) -> str:
    """Perl's POD with its formatting codes removed; code outside POD is dropped."""
    text = re.sub(r"(?ms)^=(?:begin|for)\b.*?^=end\b[^\n]*$", "", source)
    text = re.sub(r"(?m)^=(?:head\d|item|over|back|cut|pod|encoding)\b *(\d+$)?", "", text)
    for _ in range(3):
        text = re.sub(r"[BCFILSXE]<(?:<+ )?([^<>]*?)(?: >+)?>", _pod_code, text)
    return text


def _pod_code(match: re.Match[str]) -> str:
    inner = match.group(1)
    if match.group(0)[0] == "X":
        return ""
    if match.group(0)[0] == "E":
        return {"lt": "<", "gt": ">", "sol": "/", "verbar": "|"}.get(inner, inner)
    return inner.split("|")[0]


def info_to_text(source: str) -> str:
    """GNU Info without node headers, menus and index pages."""
    nodes = []
    for node in source.split("\x1f"):
        body = node.lstrip("\n").split("\n", 1)
        if len(body) < 2 or "Index" in body[0] or not body[0].startswith("File:"):
            continue
        nodes.append(re.sub(r"(?m)^\* (Menu:|[^\n]*::?[^\n]*)$\n?", "", body[1]))
    return "\n\n".join(nodes)


def rst_to_text(source: str) -> str:
    """reStructuredText without comments, targets and role markup."""
    text = _RST_DIRECTIVE.sub("", source)
    text = re.sub(r":(?:[a-z]+:)?[a-z-]+:`~?!?([^`<]*?)(?: *<[^`]*>)?`", r"\1", text)
    return re.sub(r"(?m)^:orphan:\n", "", text)
