"""The figures of `bench.operator_load` as a page of the documentation."""

from typing import Any

Json = dict[str, Any]


def page(found: Json) -> str:
    """The figures as a page of the documentation."""
    create, many, steady, odd = found["creation"], found["scale"], found["scale"]["steady"], found["strange"]
    rate = create["rate_ratio"]
    rows = [
        ("Pods created a second, 16 at once, without / with the webhook",
         f"{create['pods_a_second_without']:.0f} / {create['pods_a_second']:.0f}"),
        ("Ratio of the two (least and most of a round)",
         f"{rate['median']:.2f} ({rate['least']:.2f} to {rate['most']:.2f})"),
        ("Added to one request, median / 99th percentile",
         f"{create['added_median_ms']:.0f} ms / {create['added_p99_ms']:.0f} ms"),
        ("Processor time of the webhook for one review", f"{create['webhook_processor_ms_a_review']:.1f} ms"),
        (f"{many['pools']:,} pools created, all Ready", f"{many['pools_created_and_ready_seconds']:.0f} s"),
        (f"{many['members']:,} pods injected", f"{many['members_a_second']:.0f} a second"),
        ("All counted, and all pools Ready, after the last one",
         f"{many['members_counted_after_the_last_seconds']:.1f} s"),
        (f"Writes of any kind in a steady state of {steady['seconds']} s, by the API server's count",
         f"{steady['writes']}"),
        ("Cores of the controller meanwhile", f"{steady['cores']:.3f}"),
        ("Memory of the controller / of the webhook",
         f"{many['controller_megabytes']:.0f} MB / {many['webhook_megabytes']:.0f} MB"),
        ("Processor time of the controller for all of it", f"{many['controller_processor_seconds']:.0f} s"),
        ("Killed and started again: all pools looked at, nothing written / memory then",
         f"{many['restart_seconds']:.0f} s / {many['restart_megabytes']:.0f} MB"),
        ("Generated pods through the injection / refused with a reason",
         f"{odd['through_the_function']:,} / {odd['through_the_function'] - odd['injected']:,}"),
        ("Generated pods through the API server / injected as a whole / refused by Kubernetes itself",
         f"{odd['through_the_api_server']:,} / {odd['injected_as_a_whole']:,} / "
         f"{odd['refused_by_kubernetes_itself']:,}"),
        ("Invalid patches, half injected pods", f"{odd['invalid_patches']}, {odd['half_injected']}"),
    ]  # fmt: skip
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"""# The operator under load

Written by `make bench-operator` on {found["date"]}: a real kube-apiserver and Mooncake master, one controller and one
webhook process, on two shared cores. API server, etcd, webhook and the client that creates the pods all run on them,
so rates are lower than on a real control plane; the ratio within a round is what can be compared. The aim is 0.7. Here
it is out of reach: what one review costs is taken from the same two cores that pods are created with.

![Rates, times and memory](operator.svg)

| What | Figure |
|---|---|
{table}
"""
