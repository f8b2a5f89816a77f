"""Generates the tables of the README from the JSON results in this folder.

    python tools/gpt_oss/benchmarks/table.py            # prints them
    python tools/gpt_oss/benchmarks/table.py --write    # writes them into the README

Most files are results of ``python -m gpt_oss benchmark``: ``h200_steps.json``, ``h200_many.json``, ``h200_few.json``,
``h200_two.json``, ``h200_long_one.json``, ``h200.json``, ``h200_long.json``, ``h200_penalties.json``, ``h200_20b_one.json``,
``h200_20b.json``, ``h200_variants.json``, ``h200_fp8_activations.json``, ``h200_dense_one.json`` and ``h200_dense.json``.
``beside_vllm.json`` is a result of `beside_vllm.py`. Missing results are omitted. A decode step that several results have is shown
from the first of them, and a prefill likewise.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"

# Target values (bars) for GPT-OSS-120B on one H200: milliseconds per decode step by batch and context, and tokens per second of a
# prefill by prompts and tokens.
STEP_BARS = {(1, 1024): 1.67, (4, 1024): 2.95, (16, 1024): 7.1, (64, 1024): 14.9, (256, 1024): 21.5, (1, 32768): 2.0}
PREFILL_BARS = {(1, 1024): 1024 / 0.027, (8, 1024): 58e3, (4, 8192): 55e3}


def _results(*names: str) -> Iterator[dict[str, Any]]:
    for name in names:
        file = HERE / f"{name}.json"
        if file.exists():
            yield json.loads(file.read_text())


def made_on(result: dict[str, Any]) -> list[str]:
    """Returns lines that name the device, the software versions and the command of a result."""
    metadata = result["metadata"]
    versions = [f"torch {metadata['torch']}", f"Triton {metadata['triton']}", f"commit {metadata['git_commit'][:12]}"]
    driver = [f"driver {metadata['driver']}"] if metadata.get("driver") else []
    return [", ".join([metadata["device"], *driver, *versions]) + ":", "", f"`{metadata['command']}`", ""]


def _bar(bars: Mapping[tuple[int, int], float], result: dict[str, Any], batch: int, tokens: int) -> float | None:
    """Returns the target value of a row, or None: only GPT-OSS-120B has target values."""
    return bars.get((batch, tokens)) if result["workload"]["preset"] == "gpt-oss-120b" else None


def decode(results: list[dict[str, Any]]) -> list[str]:
    """Returns the table of decode steps: one line per batch and context, for the first variant."""
    lines = [
        "| batch | context | commit | tokens are | ms a step | bar | ms bare | engine / bare "
        "| experts a layer | ms floor | tokens/s |",
        "|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    found: dict[tuple[int, int, str], str] = {}
    for result in results:
        chosen = "sampled" if result["workload"]["temperature"] else "greedy"
        if result["workload"].get("penalties"):  # missing in older results
            chosen += ", with penalties"
        for row in next(iter(result["variants"].values()))["decode"]:
            bar, floor = _bar(STEP_BARS, result, row["batch"], row["context"]), row["milliseconds_floor"]
            found.setdefault(
                (row["context"], row["batch"], chosen),
                f"| {row['batch']} | {row['context']} | {result['metadata']['git_commit'][:8]} | {chosen} | "
                f"{row['milliseconds_a_step']:.3f} | {'' if bar is None else f'{bar:g}'} | "
                f"{row['milliseconds_bare']:.3f} | {row['over_bare']:.3f} | {row['experts_a_layer']:.1f} | "
                f"{'' if floor is None else f'{floor:.2f}'} | {row['tokens_per_second']:.0f} |",
            )
    return lines + [found[step] for step in sorted(found)]


# Families of operators, and what each family does in this model.
FAMILIES = {
    "decoder": "layers in one call",
    "moe": "experts, routing",
    "gemm": "GEMMs",
    "attention": "attention",
    "norm": "norms",
    "embedding": "rotary embedding",
}


def operators(results: list[dict[str, Any]]) -> list[str]:
    """Returns the table of operators: one line per pass of the first variant, with the time of each family of operators, measured
    in isolation, and its time by the roofline.
    """
    lines = [
        "| pass | bare | " + " | ".join(f"{what}: µs, floor" for what in FAMILIES.values()) + " | all |",
        "|---|" + "--:|" * (len(FAMILIES) + 2),
    ]
    seen = set()
    for result in results:
        measured = next(iter(result["variants"].values()))
        passes = [(f"decode {row['batch']} x {row['context']}", row) for row in measured["decode"]]
        passes += [(f"prefill {row['batch']} x {row['tokens']}, two layers", row) for row in measured["prefill"]]
        for name, row in passes:
            found = {of_one["family"]: of_one for of_one in row.get("families", ())}
            if not found or name in seen:
                continue
            seen.add(name)
            cells = [_time_and_floor(found[family]) if family in found else "" for family in FAMILIES]
            bare = f"{1e3 * row['milliseconds_bare']:.0f}" if "milliseconds_bare" in row else ""
            together = sum(of_one["microseconds"] for of_one in found.values())
            lines.append(f"| {name} | {bare} | {' | '.join(cells)} | {together:.0f} |")
    return lines


def _time_and_floor(family: dict[str, Any]) -> str:
    took, part = family["microseconds"], family["share_of_roofline"]
    return f"{took:.0f}" if part is None else f"{took:.0f}, {part * took:.0f}"


def prefill(results: list[dict[str, Any]]) -> list[str]:
    """Returns the table of prefills: one line per prefill and variant."""
    lines = ["| variant | prompts | tokens of each | ms | tokens/s | bar |", "|---|--:|--:|--:|--:|--:|"]
    found: dict[tuple[str, int, int], str] = {}
    for result in results:
        for variant, measured in result["variants"].items():
            for row in measured["prefill"]:
                bar = _bar(PREFILL_BARS, result, row["batch"], row["tokens"])
                found.setdefault(
                    (variant, row["batch"], row["tokens"]),
                    f"| {variant} | {row['batch']} | {row['tokens']} | {1e3 * row['seconds']:.1f} | "
                    f"{row['tokens_per_second']:.0f} | {'' if bar is None else f'{bar:.0f}'} |",
                )
    return [*lines, *found.values()]


def variants(result: dict[str, Any]) -> list[str]:
    """Returns the table of variants: each variant's step times, and the divergence of its distributions from the first
    variant's.
    """
    first = next(iter(result["variants"]))
    steps = [(row["batch"], row["context"]) for row in result["variants"][first]["decode"]]
    heading = "".join(f" {batch} x {context}, ms |" for batch, context in steps)
    lines = [
        f"| variant |{heading} compared with | mean KL, nats | largest | with the same experts | same most likely token |",
        "|---|" + "--:|" * len(steps) + "---|" + "--:|" * 4,
    ]
    for name, measured in result["variants"].items():
        milliseconds = {(row["batch"], row["context"]): f"{row['milliseconds_a_step']:.3f}" for row in measured["decode"]}
        times = "".join(f" {milliseconds.get(step, '')} |" for step in steps)  # empty if the run ended before this step
        found = measured["divergence"]
        whose = "itself, in shorter chunks" if name == first else first
        forced = found.get("mean_kl_with_the_same_experts")  # missing in older results
        apart = f"{whose} | {found['mean_kl']:.2g} | {found['largest_kl']:.2g} | {'' if forced is None else f'{forced:.2g}'}"
        if forced is not None or name != first:
            lines.append(f"| {name} |{times} {apart} | {found['same_most_likely']:.1%} |")
        else:
            lines.append(f"| {name} |{times} | | | | |")
    return lines


def beside_vllm(result: dict[str, Any]) -> list[str]:
    """Returns the table of our times and vLLM's, one line per decode step and prefill."""
    theirs = {experts: found for experts, found in result["vllm"].items() if "error" not in found}
    ours = result["ours"]["variants"]["optimised"]
    version = next(iter(theirs.values()))["vllm"] if theirs else ""
    names = "".join(f" vLLM {version}, {experts} | over ours |" for experts in theirs)
    lines = [f"| | ours |{names}", "|---|--:|" + "--:|--:|" * len(theirs)]
    for index, row in enumerate(ours["decode"]):
        step = row["milliseconds_a_step"]
        cells = ""
        for found in (each["decode"][index] for each in theirs.values()):
            other = found["milliseconds_a_step"]
            steady = _is_steady(found.get("few_s", ())) and _is_steady(found.get("many_s", ()))
            cells += f" {other:.3f} ms | {other / step:.2f} |" if steady else " disturbed | |"
        lines.append(f"| decode, batch {row['batch']}, context {row['context']} | {step:.3f} ms |{cells}")
    for index, row in enumerate(ours["prefill"]):
        rate = row["tokens_per_second"]
        cells = ""
        for found in (each["prefill"][index] for each in theirs.values()):
            other = found["tokens_per_second"]
            steady = _is_steady(found.get("all_seconds", ()))
            cells += f" {other / 1e3:.1f}K tokens/s | {rate / other:.2f} |" if steady else " disturbed | |"
        lines.append(f"| prefill, {row['batch']} x {row['tokens']} | {rate / 1e3:.1f}K tokens/s |{cells}")
    return lines


def _is_steady(seconds: Sequence[float]) -> bool:
    """Returns whether at least two runs took about the median time. If not, vLLM compiled kernels during some of the runs."""
    middle = statistics.median(seconds) if seconds else 0.0
    return not seconds or sum(abs(each - middle) <= 0.1 * middle for each in seconds) > 1


def section() -> str:
    """Returns the text between the README's two markers."""
    lines: list[str] = []
    few = list(_results("h200_steps", "h200_many", "h200_few", "h200_two", "h200_long_one"))
    measured = list(_results("h200", "h200_long"))
    with_penalties = list(_results("h200_penalties"))
    if measured:
        lines += made_on(measured[0]) + decode(few + measured + with_penalties) + [""] + prefill(few[:3] + measured[:1])
        lines += [
            "",
            "For each family of operators: the total time of its calls in one pass, timed in isolation with cold caches, then",
            "the floor, the time that the measured roofline allows for these calls. *all* is the sum of the families' times.",
            "*bare* is the time of the whole pass without the engine. All times are in µs:",
            "",
        ]
        lines += operators(few + measured[:1])
        if len(measured[0]["variants"]) > 1:
            lines += ["", "The variants of these passes:", "", *variants(measured[0])]
    small = list(_results("h200_20b_one", "h200_20b"))
    if small:
        last = small[-1]
        lines += ["", "GPT-OSS-20B:", "", f"`{last['metadata']['command']}`", "", *decode(small), "", *prefill([last])]
    for result in _results("h200_variants", "h200_fp8_activations", "h200_dense_one", "h200_dense"):
        lines += [
            "",
            "Variants with fewer bits per value, run one after the other in one process:",
            "",
            f"`{result['metadata']['command']}`",
            "",
        ]
        lines += [*variants(result), "", *prefill([result])]
    for result in _results("beside_vllm"):
        commit = result["ours"]["metadata"]["git_commit"][:8]
        heading = f"Compared with vLLM on the same GPU, with the same weights and prompts, greedy, commit {commit}:"
        lines += ["", heading, "", *beside_vllm(result)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    if not parser.parse_args().write:
        print(section())
        return
    text = README.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(f"{text[:begin]}\n\n{section()}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
