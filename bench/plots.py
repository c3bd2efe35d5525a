"""Plots: the figures of one run as SVG files that are the same for the same figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.page import ONE_SEGMENT

_BLUE, _ORANGE, _GREY = "#1f77b4", "#ff7f0e", "#888888"


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write all plots of a result; returns their files."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and no random or dated identifiers: a plot changes only with its figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvshare", "font.size": 8})
    cases = result["transfers"]
    files = [
        _bars(
            cases, "to_one_segment", "time / time of one-segment objects", folder / "transfers-one-segment.svg",
            line=ONE_SEGMENT, logarithmic=False,
        ),
        _bars(
            [case for case in cases if case["vllm_to_ours"] is not None], "vllm_to_ours",
            "time of vLLM's shapes / ours", folder / "transfers-vllm.svg", line=1.0, logarithmic=True,
        ),
    ]  # fmt: skip
    if (whole := result.get("end_to_end")) is not None:
        files.append(_throughput(whole, folder / "end-to-end.svg"))
    return files


def _bars(
    cases: Sequence[Mapping[str, Any]], field: str, label: str, file: Path, *, line: float, logarithmic: bool
) -> Path:
    from matplotlib import pyplot

    names = list(dict.fromkeys((case["layout"], case["tokens"], case["width"]) for case in cases))
    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    for shift, (operation, colour) in enumerate((("save", _BLUE), ("load", _ORANGE))):
        chosen = {(c["layout"], c["tokens"], c["width"]): c[field] for c in cases if c["operation"] == operation}
        heights = [chosen[name]["median"] for name in names]
        below = [chosen[name]["median"] - chosen[name]["least"] for name in names]
        above = [chosen[name]["most"] - chosen[name]["median"] for name in names]
        places = [n + 0.4 * shift - 0.2 for n in range(len(names))]
        axes.bar(places, heights, 0.4, label=operation, color=colour)
        axes.errorbar(places, heights, yerr=[below, above], fmt="none", ecolor="black", elinewidth=0.6)
    axes.axhline(line, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), [f"{a} {b}/{c}" for a, b, c in names], rotation=90)
    axes.set_xlabel("layout, block tokens / heads of a shard")
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file


def _throughput(whole: Mapping[str, Any], file: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 2.2), layout="constrained")
    names = ("plain", "cold", "cached")
    axes.barh([0, 1, 2], [whole[name] for name in names], color=[_GREY, _BLUE, _ORANGE])
    axes.set_yticks([0, 1, 2], ["without connector", "computed and stored", "read"])
    axes.invert_yaxis()
    axes.set_xlabel("prompt tokens per second")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
