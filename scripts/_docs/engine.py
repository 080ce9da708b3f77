"""The engine's own costs, and whether an answer depends on its company: memory of loading, overhead, soaks."""

from __future__ import annotations

from _docs.results import Result, found, made_with, single
from _docs.text import grouped, markdown, table


def loading() -> str:
    """The most memory that loading a checkpoint of LLaDA-8B's size takes."""
    result = single("loading")
    text = table(
        result["loads"],
        {
            "weights in memory": lambda load: "fp8" if load["quantization"] else load["dtype"],
            "read at a time": _stage,
            "their size": lambda load: _gigabytes(load["weight_bytes"]),
            "most resident memory": lambda load: f"{_gigabytes(load['peak_bytes'])} ({load['ratio']:.3f})",
            "without mapped files": lambda load: (
                f"{_gigabytes(load['peak_anonymous_bytes'])} ({load['anonymous_ratio']:.3f})"
            ),
        },
    )
    first = result["loads"][0]
    return f"{text}\n\n{_gigabytes(first['file_bytes'])} in {first['num_shards']} files; {made_with(result)}"


def _stage(load: Result) -> str:
    whole = load["stage_bytes"] >= load["file_bytes"]
    return "whole tensors" if whole else f"{load['stage_bytes'] / 2**20:.0f} MB"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def overhead() -> str:
    """The engine's own share of a run, and its forward beside bare torch."""
    result = single("overhead")
    runs = {
        "seats": "{seats}",
        "requests": "{num_requests}",
        "passes": "{num_passes}",
        "seconds": "{seconds:.1f}",
        "outside network, scores and tokenizer": "{share_outside:.1%}",
    }
    forwards = {
        "rows": "{num_seqs} x {length}",
        "ours, ms": "{ours_ms:.2f}",
        "bare torch, ms": "{bare_ms:.2f}",
        "ratio": "{ratio:.2f}",
    }
    return f"{table(result['runs'], runs)}\n\n{table(result['forwards'], forwards)}\n\n{made_with(result)}"


def batching() -> str:
    """How many answers of the shipped model depend on their company; on a GPU, captured against eager too."""
    on_gpu = " (in captured steps with our kernels; alone in eager steps of plain torch)"
    return "\n\n".join(
        f"{result['num_different']} of {result['num_requests']} answers differed between alone and batches of "
        f"{result['seats']}{on_gpu if result['variant'] == 'gpu' else ''}; {made_with(result)}"
        for result in found("batching")
    )


def continuous() -> str:
    """Loads in which requests join, wait, are cancelled and leave, method by method."""
    result = single("continuous")
    text = table(
        result["loads"],
        {
            "method": "`{method}`",
            "network": "{network}",
            "requests": "{num_requests}",
            "cancelled": "{num_cancelled}",
            "steps": "{num_passes}",
            "waits for rows": "{num_waits}",
            "other answers": lambda load: len(load["different"]),
            "pages lost": "{lost_pages}",
        },
    )
    return f"{text}\n\n{result['num_requests']} requests, {result['seats']} seats; {made_with(result)}"


def captured() -> str:
    """The same loads on a GPU, against requests alone in eager steps of plain torch."""
    result = single("captured")
    rows = [
        [
            way,
            len(loads),
            *(sum(load[name] for load in loads) for name in ("num_requests", "num_cancelled", "num_passes")),
            sum(len(load["different"]) for load in loads),
            sum(load["lost_pages"] for load in loads),
            sum(load["num_host_waits"] for load in loads) if all("num_host_waits" in each for each in loads) else "-",
        ]
        for (way,), loads in grouped(result["loads"], "way").items()
    ]
    head = ["crowd", "methods and networks", "requests", "cancelled", "steps", "other answers", "pages lost"]
    head.append("waits of the host for a seat")
    parts = [markdown(head, rows), *([_buckets(result["buckets"])] if result.get("buckets") else [])]
    return "\n\n".join([*parts, f"{made_with(result)} {_code(result)}"])


def _buckets(loads: list[Result]) -> str:
    """Loads of one size of captured step each: passes that it ran, and answers that are not those of requests alone."""
    seats = list(dict.fromkeys(each for load in loads for each in load["num_replays"]))
    rows = [
        [
            load["way"],
            f"`{load['method']}`",
            *(load["num_replays"].get(each, "-") if load["captured"] else "not captured" for each in seats),
            sum(map(len, load["different"].values())),
        ]
        for load in loads
    ]
    return markdown(["crowd", "method", *(f"passes of {each}" for each in seats), "other answers"], rows)


def _code(result: Result) -> str:
    """The commit that ran, and whether what it tested has changed since: no test holds this result to the code."""
    from unmask.eval.continuous import source_digest

    commit = f"Commit {(result['environment'].get('commit') or 'unknown')[:7]}"
    return f"{commit}." if result["source_digest"] == source_digest() else f"{commit}, of earlier code."
