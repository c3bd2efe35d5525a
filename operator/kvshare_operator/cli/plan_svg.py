"""A plan's picture as SVG: what the documentation's figures are made of. Pure, the same text every time."""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree as Xml

from kvshare_operator.cli.plan_drawing import Drawing

#: Okabe and Ito's colours, told apart by everybody; dark text stays readable on each.
COLOURS: Final = ("#56b4e9", "#e69f00", "#5fc9a4", "#f0e442", "#cc79a7", "#e8845a", "#9bb7d9", "#bbbbbb")
INK, PAPER, LINE = "#1b1f24", "#ffffff", "#57606a"
FONT = "font-family: system-ui, sans-serif; font-size: 13px"
_LEFT, _CELL, _ROW, _GAP, _MARGIN = 130, 92, 26, 8, 14


def plan_svg(drawing: Drawing, title: str) -> str:
    """Return the picture of a plan; ``title`` is its accessible name and stands above it."""
    width = 2 * _MARGIN + _LEFT + drawing.shards * _CELL
    rows = _Rows(width, title)
    rows.text("One block", bold=True)
    for shard in range(drawing.shards):
        rows.cell(shard, shard, f"shard {shard}", fill=False)
    rows.next()
    if drawing.heads:
        rows.text("KV heads")
        for shard, heads in enumerate(drawing.heads):
            rows.cell(shard, shard, heads, fill=not drawing.stages)
        rows.next()
    for stage in drawing.stages:
        rows.text(f"layers {stage.layers}")
        for shard in range(drawing.shards):
            rows.cell(shard, shard, f"s{shard}p{stage.number}")
        rows.next()
    for lane in drawing.lanes:
        rows.gap(_GAP if lane.title else 0)
        rows.text(lane.title, bold=True)
        for bar in lane.bars:
            for shard in range(bar.first, bar.last + 1):
                rows.cell(shard, shard, "")
            rows.frame(bar.first, bar.last, bar.text)
        rows.next()
    for note in drawing.notes:
        rows.text(note)
        rows.next()
    return rows.finished()


class _Rows:
    """An SVG that grows downwards, row after row; columns are shards."""

    def __init__(self, width: int, title: str) -> None:
        self._root = Xml.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "style": FONT})
        self._width, self._y = width, _MARGIN
        Xml.SubElement(self._root, "title").text = title
        self._paper = Xml.SubElement(self._root, "rect", {"width": str(width), "rx": "6", "fill": PAPER})
        self.text(title)
        self.next()

    def text(self, text: str, *, bold: bool = False) -> None:
        """Write at the left of the row."""
        self._write(text, _MARGIN, "start", bold=bold)

    def cell(self, first: int, last: int, text: str, *, fill: bool = True) -> None:
        """Draw a coloured cell over the columns ``first`` to ``last``."""
        if fill:
            self._box(first, last, COLOURS[first % len(COLOURS)], PAPER)
        if text:
            self._write(text, self._middle(first, last), "middle")

    def frame(self, first: int, last: int, text: str) -> None:
        """Draw the outline of what one rank holds, with its name in the first column."""
        self._box(first, last, "none", INK)
        self._write(text, self._middle(first, first), "middle")

    def gap(self, height: int) -> None:
        """Leave some room."""
        self._y += height

    def next(self) -> None:
        """Begin the next row."""
        self._y += _ROW

    def finished(self) -> str:
        """Return the text of the file."""
        height = self._y + _MARGIN
        self._root.set("viewBox", f"0 0 {self._width} {height}")
        self._root.set("width", str(self._width))
        self._paper.set("height", str(height))
        Xml.indent(self._root)
        return Xml.tostring(self._root, encoding="unicode") + "\n"

    def _middle(self, first: int, last: int) -> float:
        return _MARGIN + _LEFT + (first + last + 1) * _CELL / 2

    def _box(self, first: int, last: int, fill: str, stroke: str) -> None:
        values = {
            "x": _MARGIN + _LEFT + first * _CELL + 1,
            "y": self._y + 1,
            "width": (last - first + 1) * _CELL - 2,
            "height": _ROW - 2,
            "rx": 3,
        }
        attributes = {name: str(value) for name, value in values.items()}
        Xml.SubElement(self._root, "rect", {**attributes, "fill": fill, "stroke": stroke})

    def _write(self, text: str, x: float, anchor: str, *, bold: bool = False) -> None:
        attributes = {"x": f"{x:g}", "y": str(self._y + 18), "text-anchor": anchor, "fill": INK}
        if bold:
            attributes["font-weight"] = "bold"
        Xml.SubElement(self._root, "text", attributes).text = text
