"""The picture of the fault trials: how much longer requests took while something went wrong."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_BLUE, _ORANGE, _GREY = "#1f77b4", "#ff7f0e", "#888888"


def draw(rows: Sequence[Mapping[str, object]], file: Path) -> None:
    """Write an SVG that changes only with the rows.

    Args:
        rows: of the table, see ``fault_trials.Outcome``.
        file: where to.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvshare", "font.size": 8})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.27 * len(rows)), layout="constrained")
    for shift, (field, label, colour) in enumerate(
        (("median_ratio", "median", _BLUE), ("tail_ratio", "95 %", _ORANGE))
    ):
        values = [float(str(row[field])) for row in rows]
        axes.barh([n + 0.4 * shift - 0.2 for n in range(len(rows))], values, 0.4, label=label, color=colour)
    axes.axvline(1.0, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [str(row["title"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("latency to the run in which nothing goes wrong")
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
