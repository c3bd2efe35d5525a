"""GPU page: the generated page about the kernels on a GPU, from the figures of one run. Pure."""

import statistics
from collections.abc import Mapping
from typing import Any


def write_page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    machine, transfers = result["machine"], result["executor"]
    lines = [
        "# Kernels on a GPU",
        "",
        f"Written by `bench/gpu.py` on {machine['date']}: {machine['device']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, {result['seconds']} s.",
        "",
        f"Exactness came first: {result['comparisons']} comparisons with plain torch, byte for byte over whole "
        f"allocations, and {transfers['proved']} layouts saved and loaded by the packed executor.",
        "",
    ]
    if not result["shapes"]:
        return "\n".join([*lines, "No CUDA device was used, so there are no figures.", ""])
    lines += [
        f"{len(result['shapes'])} of {result['shapes_wanted']} shapes were measured. Percentages are of the device's "
        "own copy of as many bytes, in turn with the kernel; the last column includes the host's part of a call.",
        "",
        "| Layout | Layers | Block | Heads | Head size | Copy GB/s | Pack | Unpack | Whole call |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in result["shapes"]:
        shares = " | ".join(f"{one[name] / one['copy']:.0%}" for name in ("pack", "unpack", "call"))
        lines.append(
            f"| {one['layout']} | {one['layers']} | {one['tokens']} | {one['heads']} | {one['head_size']} | "
            f"{one['copy']:.0f} | {shares} |"
        )
    for name in ("pack", "unpack"):
        parts = [one[name] / one["copy"] for one in result["shapes"]]
        lines += [
            "",
            f"{name.capitalize()}: median {statistics.median(parts):.0%}, least {min(parts):.0%}, "
            f"{sum(part >= 0.9 for part in parts)} of {len(parts)} shapes at 90 % or more.",
        ]
    lines += [
        "",
        f"The packed executor with a store in the host's memory: saves {transfers['save']:.1f} GB/s (pinned copy to "
        f"the host {transfers['to_host']:.1f}), loads {transfers['load']:.1f} GB/s (pinned copy to the device "
        f"{transfers['to_device']:.1f}); the store's own copies are part of it.",
        "",
    ]
    return "\n".join(lines)
