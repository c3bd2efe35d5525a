"""The figures of `bench.operator_load` as a picture: rates, waiting times, memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLUE, _GREY = "#1f77b4", "#888888"


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write an SVG that changes only with the figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvshare", "font.size": 8})
    from matplotlib import pyplot

    create, many = found["creation"], found["scale"]
    panels: list[tuple[str, dict[str, float], int]] = [
        (
            "pods created a second, 16 at once",
            {"without the webhook": create["pods_a_second_without"], "with it": create["pods_a_second"]}, 0,
        ),
        (
            f"seconds, {many['pools']:,} pools and {many['members']:,} members",
            {
                "all pools\nReady": many["pools_created_and_ready_seconds"],
                "all members\ncounted": many["members_counted_after_the_last_seconds"],
                "after a\nrestart": many["restart_seconds"],
            }, 1,
        ),
        (
            "megabytes",
            {
                "controller": many["controller_megabytes"], "after a\nrestart": many["restart_megabytes"],
                "webhook": many["webhook_megabytes"],
            }, 0,
        ),
    ]  # fmt: skip
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(9, 2.2), layout="constrained")
    for axes, (title, values, digits) in zip(all_axes, panels, strict=True):
        bars = axes.bar(
            list(values),
            list(values.values()),
            0.6,
            color=[_GREY if name == "without the webhook" else _BLUE for name in values],
        )
        axes.bar_label(bars, fmt=f"%.{digits}f")
        axes.set_title(title)
        axes.margins(y=0.15)
        axes.tick_params(axis="x", labelsize=7)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
