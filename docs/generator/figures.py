"""Figures of the documentation: pictures of `kvshare plan`, of two memory layouts, and of a run of the demo."""

import json

from typer.testing import CliRunner

from generator.source import ROOT
from kvshare_operator.cli.main import app
from kvshare_operator.cli.plan_svg import COLOURS, FONT, INK, PAPER

REPORT = ROOT / "docs" / "tutorial" / "report.json"
"""Rows of `build/demo/report.json` after a real `make demo`."""


def plan(*words: str) -> str:
    """What `kvshare plan ... -o svg` prints."""
    result = CliRunner().invoke(app, ["plan", *words, "-o", "svg"])
    if result.exit_code:
        raise ValueError(f"kvshare plan {' '.join(words)}: {result.output}")
    return result.stdout


def three_sizes() -> str:
    """TP 4, 2 and 1 over eight heads."""
    return plan("--kv-heads", "8", "--prefill", "4,2", "--decode", "1")


def replicas() -> str:
    """More ranks than heads."""
    return plan("--kv-heads", "2", "--prefill", "4", "--decode", "1")


def stages() -> str:
    """Two pipeline sizes."""
    return plan("--kv-heads", "4", "--prefill", "2", "--decode", "1", "--pp", "1,2", "--layers", "8")


def layouts() -> str:
    """The order in memory of one layer of one block: 4 heads, 4 tokens; each cell has its head's colour."""
    cell, left, row = 32, 190, 40
    width = left + 16 * cell + 14
    out = _Picture(width, "One layer of one block in memory: 4 heads of 4 tokens, TP 1 and rank 0 of TP 2")
    lines = (
        ("TP 1, token-major (NHD)", [(head, token) for token in range(4) for head in range(4)]),
        ("TP 1, head-major (HND)", [(head, token) for head in range(4) for token in range(4)]),
        ("TP 2, rank 0, NHD", [(head, token) for token in range(4) for head in range(2)]),
        ("TP 2, rank 0, HND", [(head, token) for head in range(2) for token in range(4)]),
    )
    for number, (title, cells) in enumerate(lines):
        y = 46 + number * row
        out.text(14, y + 20, title)
        for place, (head, token) in enumerate(cells):
            out.box(left + place * cell, y, cell - 2, 28, COLOURS[head])
            out.text(left + place * cell + cell / 2 - 1, y + 19, f"{head}.{token}", "middle")
    out.text(14, 46 + len(lines) * row + 16, "A cell 2.1 holds K and V of head 2 for token 1.")
    return out.finished(46 + len(lines) * row + 30)


def demo() -> str:
    """Prompt tokens of each step of the demo: from the cache, and computed."""
    rows = json.loads(REPORT.read_text())["rows"]
    most = max(row["prompt_tokens"] for row in rows)
    left, room = 330, 420
    out = _Picture(left + room + 100, "Prompt tokens of the demo's steps: taken from the shared cache, and computed")
    for number, row in enumerate(rows):
        y = 46 + number * 44
        cached = room * row["cached_tokens"] / most
        whole = room * row["prompt_tokens"] / most
        out.text(14, y + 13, row["step"])
        out.text(14, y + 29, f"TP {row['tp']}, {row['layout']}")
        out.box(left, y, whole, 28, COLOURS[7])
        if cached:
            out.box(left, y, cached, 28, COLOURS[2])
        out.text(left + whole + 8, y + 19, f"{row['cached_tokens']} / {row['prompt_tokens']}")
    y = 46 + len(rows) * 44
    for place, (colour, word) in enumerate(((COLOURS[2], "from the shared cache"), (COLOURS[7], "computed"))):
        out.box(left + place * 190, y, 14, 14, colour)
        out.text(left + place * 190 + 20, y + 12, word)
    return out.finished(y + 30)


class _Picture:
    """SVG by hand: boxes and words."""

    def __init__(self, width: float, title: str) -> None:
        self._width, self._parts = width, []  # type: float, list[str]
        self._title = title
        self.text(14, 28, title)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled box."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """A word or a line."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}">{text}</text>')

    def finished(self, height: float) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {self._width:g} {height:g}" '
            f'width="{self._width:g}" style="{FONT}">\n<title>{self._title}</title>\n'
            f'<rect width="{self._width:g}" height="{height:g}" rx="6" fill="{PAPER}"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
