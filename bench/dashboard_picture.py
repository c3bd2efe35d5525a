"""The dashboard as a picture: places, titles and units of `kvshare.json`, with series that were queried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PAPER, _PANEL, _INK, _FAINT = "#111217", "#181b1f", "#d8d9da", "#7b7d82"
_COLUMNS = 24
#: Inches of one column and one row of the dashboard's grid.
_WIDTH, _HEIGHT = 0.66, 0.26
_UNITS = {"percentunit": (100.0, "%"), "Bps": (1e-6, "MB/s"), "cps": (1.0, "/s"), "s": (1e3, "ms"), "µs": (1.0, "µs")}


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        name: what the legend says.
        seconds: times since the beginning.
        values: values at these times.
    """

    name: str
    seconds: Sequence[float]
    values: Sequence[float]


def draw(panels: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Line]], file: Path) -> None:
    """Draw all panels.

    Args:
        panels: the dashboard's, as its JSON has them.
        found: the series of each panel, by its title.
        file: an SVG.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvshare", "font.size": 7})
    from matplotlib import pyplot

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT
    figure = pyplot.figure(figsize=(width, height), facecolor=_PAPER)
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / _COLUMNS, 1 - place["y"] / rows
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.8 / rows, panel["title"], color=_INK, fontsize=10, weight="bold")
            continue
        margin = (0.040, 0.008) if panel["type"] == "timeseries" else (0.006, 0.006)
        box = (
            left + margin[0], top - (place["h"] - 1.6) / rows,
            place["w"] / _COLUMNS - sum(margin), (place["h"] - 3.2) / rows,
        )  # fmt: skip
        axes = figure.add_axes(box, facecolor=_PANEL)
        axes.set_title(panel["title"], color=_INK, fontsize=8, loc="left")
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        _panel(axes, str(panel["type"]), str(unit), found.get(panel["title"], ()))
    figure.savefig(file, metadata={"Date": None}, facecolor=_PAPER)
    pyplot.close(figure)


def _panel(axes: Any, kind: str, unit: str, lines: Sequence[Line]) -> None:
    for side in axes.spines.values():
        side.set_color("#2c3235")
    axes.tick_params(colors=_FAINT, labelsize=6, length=0)
    factor, suffix = _UNITS.get(unit, (1.0, ""))
    if kind != "timeseries" or not lines:
        axes.set_xticks([])
        axes.set_yticks([])
        text = _said(kind, unit, lines)
        size = 22 if kind == "stat" and lines else 8
        axes.text(0.5, 0.5, text, color=_INK, fontsize=size, ha="center", va="center", transform=axes.transAxes)
        return
    for line in lines[:8]:
        axes.plot(line.seconds, [value * factor for value in line.values], linewidth=1.0, label=line.name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="#2c3235", linewidth=0.5)
    axes.set_ylabel(suffix, color=_FAINT, fontsize=6)
    axes.legend(frameon=False, fontsize=5.5, labelcolor=_INK, loc="upper left", ncols=2)


def _said(kind: str, unit: str, lines: Sequence[Line]) -> str:
    if not lines:
        return "none" if kind == "table" else "No data"
    if kind == "table":
        return "\n".join(line.name for line in lines[:6])
    last = lines[0].values[-1]
    if unit == "s":
        return f"{last / 86400:.0f} days"
    factor, suffix = _UNITS.get(unit, (1.0, ""))
    return f"{last * factor:.1f} {suffix}"
