"""Page: the generated page about transfers, from the JSON of one run. Pure; the plots are in ``plots``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What was aimed at, by the group of cases: time of vLLM's shapes to ours (at least), of ours to one segment (at most).
TOKEN_MAJOR, SMALL, LARGE, ONE_SEGMENT = 30.0, 2.5, 1.0, 1.11
SMALL_BYTES, LARGE_BYTES = 16 << 10, 64 << 10


def short(value: Mapping[str, float] | None) -> str:
    """A ratio with its spread."""
    if value is None:
        return "-"
    digits = [
        f"{value[name]:.2f}" if value[name] < 10 else f"{value[name]:.0f}" for name in ("median", "least", "most")
    ]
    return f"{digits[0]} ({digits[1]} to {digits[2]})"


@dataclass(frozen=True)
class Aim:
    """What became of an aim.

    Attributes:
        sentence: the aim.
        reached: cases that reach it.
        cases: cases that it is for.
        worst: the worst median of them.
        best_possible: cases in which one segment in place of ours reaches it; None where one segment is the measure.
    """

    sentence: str
    reached: int
    cases: int
    worst: float
    best_possible: int | None


def aims(cases: Sequence[Mapping[str, Any]]) -> list[Aim]:
    """Every aim for which there are cases."""
    compared = [case for case in cases if case["vllm_to_ours"] is not None]
    against_vllm = [
        (
            "token-major: vLLM's shapes take at least 30 times as long",
            [c for c in compared if c["layout"] == "LBNHC"],
            TOKEN_MAJOR,
        ),
        (
            "head-major, at most 16 KiB a layer: at least 2.5 times as long",
            [c for c in compared if c["layout"] == "LBHNC" and c["layer_bytes"] <= SMALL_BYTES],
            SMALL,
        ),
        (
            "head-major, at least 64 KiB a layer: not shorter",
            [c for c in compared if c["layout"] == "LBHNC" and c["layer_bytes"] >= LARGE_BYTES],
            LARGE,
        ),
    ]
    found = []
    for sentence, group, least in against_vllm:
        if group:
            ours = [c["vllm_to_ours"]["median"] for c in group]
            # vLLM's time to ours, times ours to one segment's.
            one = [c["vllm_to_ours"]["median"] * c["to_one_segment"]["median"] for c in group]
            reached, possible = (sum(value >= least for value in values) for values in (ours, one))
            found.append(Aim(sentence, reached, len(group), min(ours), possible))
    times = [c["to_one_segment"]["median"] for c in cases]
    if times:
        sentence = "every layout: at most 1.11 times the time of one-segment objects"
        found.append(Aim(sentence, sum(value <= ONE_SEGMENT for value in times), len(times), max(times), None))
    return found


def _row(aim: Aim) -> str:
    possible = "-" if aim.best_possible is None else f"{aim.best_possible} of {aim.cases}"
    return f"| {aim.sentence} | {aim.reached} of {aim.cases} | {possible} | {aim.worst:.2f} |"


def write_page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    machine, cases, memory = result["machine"], result["transfers"], result["memory"]
    lines = [
        "# Transfers, requests and lookups",
        "",
        f"Written by `make bench` on {machine['date']}: {machine['cores']} cores ({machine['processor']}), load "
        f"{machine['load']} at the start, {machine['versions']}. Real Mooncake over TCP on loopback, caches in the "
        "memory of the CPU. Exactness comes first: for each combination blocks are saved, everything is overwritten, "
        "they are loaded elsewhere and all of the memory is compared; one wrong byte and there is no page.",
        "",
        "Times are compared inside a round, all competitors in turn, the order reversed from one round to the next; "
        f"ratios are medians of {result['rounds']} rounds, with the least and the most.",
        "",
        "## Transfers",
        "",
        "Saves and loads of 64 blocks of 32 layers, 512 bytes a cell, by a rank with two shards, or one of 8 heads. "
        "*One segment* is objects of the same sizes that lie ready in one buffer: nobody who must gather can be "
        "faster. *vLLM's shapes* are what "
        "vLLM's own MooncakeStoreConnector sends with a common Store TP size, made with its own functions (it shares "
        "two of the six layouts; of the token-major one 4 blocks are sent in a call and the time is taken per byte, "
        "because 64 would take minutes).",
        "",
        "![Time against one-segment objects](transfers-one-segment.svg)",
        "",
        "![vLLM's shapes against ours](transfers-vllm.svg)",
        "",
        "| Aim | Reached | One segment would reach it | Worst median |",
        "|---|---|---|---|",
        *map(_row, aims(cases)),
        "",
        "| Layout | Block | Heads of a shard | | Way | GB/s | Time to one segment | vLLM's shapes to ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        lines.append(
            f"| {case['layout']} | {case['tokens']} | {case['width']} | {case['operation']} | "
            f"{'direct' if case['direct'] else 'packed'} | {case['gigabytes_per_second']:.2f} | "
            f"{short(case['to_one_segment'])} | {short(case['vllm_to_ours'])} |"
        )
    if (whole := result.get("end_to_end")) is not None:
        lines += [
            "",
            "## Requests",
            "",
            f"{whole['requests']} prompts of {whole['prompt_tokens']} tokens, answers of {whole['answer_tokens']}, "
            f"concurrency {whole['concurrency']}, vLLM on CPU with a random float32 Llama; every answer equals that of "
            "the engine without connector.",
            "",
            "![Throughput](end-to-end.svg)",
            "",
            "| Engine | Prompt tokens per second | To the engine without connector |",
            "|---|---|---|",
            f"| without connector | {whole['plain']:.0f} | 1 |",
            f"| with connector, computed and stored | {whole['cold']:.0f} | {short(whole['cold_to_plain'])} |",
            f"| with connector, read from the store | {whole['cached']:.0f} | {short(whole['cached_to_plain'])} |",
        ]
    lines += [
        "",
        "## Lookups",
        "",
        "Prompts of which every block is stored, 4 Store shards, blocks of 16 tokens. The thread's time is that of all "
        "calls of the connector by vLLM's scheduler for this request; between them it schedules other requests.",
        "",
        "| Tokens | Keys asked | Calls | Scheduler thread, µs | Longest call, µs | Answer after, ms |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one['tokens']} | {one['keys']} | {one['calls']} | {one['thread_microseconds']:.0f} | "
            f"{one['longest_microseconds']:.0f} | {one['answer_milliseconds']:.0f} |"
            for one in result["lookups"]
        ),
        "",
        "## Memory of a rank",
        "",
        f"Staging arena: {memory['arena_bytes'] >> 20} MiB by default in {memory['parts']} parts, page-locked where an "
        "accelerator copies from it; nothing else is page-locked. A part takes "
        + ", ".join(f"{count} objects of {int(size) >> 10} KiB" for size, count in memory["objects"].items())
        + f". Packing and unpacking take at most {memory['device_bytes'] >> 20} MiB of an accelerator's own memory.",
        "",
    ]
    return "\n".join(lines)
