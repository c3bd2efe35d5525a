"""A plan's picture in a terminal: one colour for each shard; brackets say the same where there is no colour."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvshare_operator.cli.plan_drawing import Bar, Drawing

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
_TITLE, _NARROWEST, _WIDEST = 16, 6, 16
_PIPED_WIDTH = 100


def print_drawing(drawing: Drawing, out: Console) -> bool:
    """Print the picture. False when a line of the terminal is too short for it; then nothing is printed."""
    width = out.width if out.is_terminal else _PIPED_WIDTH
    cell = min(_WIDEST, (width - _TITLE) // drawing.shards)
    if cell < _NARROWEST:
        return False
    out.print(_row("One block", [(f"shard {number}", number) for number in range(drawing.shards)], cell))
    if drawing.heads:
        out.print(_row("  KV heads", [(text, number) for number, text in enumerate(drawing.heads)], cell))
    for stage in drawing.stages:
        cells = [(f"s{number}p{stage.number}", number) for number in range(drawing.shards)]
        out.print(_row(f"  layers {stage.layers}"[: _TITLE - 1], cells, cell))
    for lane in drawing.lanes:
        line = Text(lane.title.ljust(_TITLE), style="bold")
        end = 0
        for bar in lane.bars:
            line.append(" " * ((bar.first - end) * cell))
            line.append_text(_bar(bar, cell))
            end = bar.last + 1
        line.rstrip()
        out.print(line)
    for note in drawing.notes:
        out.print(note, style="dim", highlight=False)
    out.print()
    return True


def _row(title: str, cells: list[tuple[str, int]], width: int) -> Text:
    line = Text(title.ljust(_TITLE))
    for text, shard in cells:
        line.append(text[: width - 1].ljust(width), style=_colour(shard))
    line.rstrip()
    return line


def _bar(bar: Bar, cell: int) -> Text:
    """`[rank 0         ]`, each shard's part in its colour."""
    whole = (bar.last - bar.first + 1) * cell
    name = bar.text if len(bar.text) <= whole - 3 else bar.text.removeprefix("rank ")
    text = f"[{name.ljust(whole - 3)[: whole - 3]}] "
    line = Text()
    for place in range(bar.last - bar.first + 1):
        line.append(text[place * cell : (place + 1) * cell], style=f"{_colour(bar.first + place)} reverse")
    return line


def _colour(shard: int) -> str:
    return _COLOURS[shard % len(_COLOURS)]
