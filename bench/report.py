"""Writes docs/benchmarks.md from bench/results/*.json: nothing on that page is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.stats import RESULTS

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `python -m bench report` from `bench/results/`, which `make bench` measures anew (about 20 minutes).
Medians; where two things are compared they were measured in turns, A B A B, in one run. The model is of the shape of
Qwen2 with 80 M random parameters in bfloat16: the demo model is too small to keep a core busy.
"""


def main(arguments: list[str]) -> None:
    del arguments
    sections = [HEAD, *(build(_load(name)) for name, build in SECTIONS.items() if _load(name))]
    PAGE.write_text("\n".join(sections))
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _where(result: dict[str, Any], command: str) -> str:
    machine = result["machine"]
    return f"`{command}`; {machine['cores']} cores ({machine['cpu']}), {machine['when']}.\n"


def _disaggregation(result: dict[str, Any]) -> str:
    arms = result["median"]
    ours, theirs = arms["1P1D"], arms["2 aggregated"]
    load = result["load"]
    rows = [
        [label, *(f"{arm[key]:.1f}" for arm in (ours, theirs)), f"{ours[key] / theirs[key]:.2f}", goal]
        for label, key, goal in (
            ("gap between a stream's tokens, p50, ms", "itl_p50_ms", ""),
            ("the same, p99, ms", "itl_p99_ms", ""),
            ("longest gap, ms", "itl_max_ms", "at most 0.2"),
            ("first token of a short prompt, ms", "ttft_short_p50_ms", "at most 2"),
            ("first token of a long prompt, ms", "ttft_long_p50_ms", ""),
            ("tokens/s of all", "tokens_per_s", "at least 0.9"),
        )
    ]
    return "\n".join(
        [
            "## A long prompt beside running streams: 1P1D against two aggregated engines, the same two cores\n",
            f"{load['streams']} closed-loop streams of {load['short_answer'][0]} to {load['short_answer'][1]} tokens "
            f"while prompts of {load['long_prompt']} tokens arrive at {load['long_per_s']}/s; "
            f"{len(result['runs']['1P1D'])} rounds of {load['seconds']:.0f} s each.",
            _where(result, "python -m bench disaggregation"),
            _table(["", "1P1D", "2 aggregated", "ratio", "goal"], rows),
        ]
    )


def _path(result: dict[str, Any]) -> str:
    stages = ["save", "wait", "move", "check", "load", "total", "total_p95"]
    rows = [
        [name, values["requests"], *(values[stage] for stage in stages)]
        for name, values in result["median_ms"].items()
    ]
    return "\n".join(
        [
            f"## The handoff of a {result['tokens']}-token prompt, in a real 1P1D deployment\n",
            "From the end of the prefill's last step until the decode engine can take the request, milliseconds. "
            "`total` holds the router's two hops and the engine's next look besides the stages; busy: four streams "
            "are written meanwhile. Goals: 10 ms over shm, 20 ms over gRPC.",
            _where(result, "python -m bench path"),
            _table(["", "prompts", "save", "wait", "move", "check", "load", "total", "total p95"], rows),
        ]
    )


def _handoff(result: dict[str, Any]) -> str:
    rows = [[name, json.dumps(values)] for name, values in result["transports"].items()]
    return "\n".join(
        [
            "## The handoff alone, between two processes without engines\n",
            _where(result, "python -m bench handoff"),
            _table(["transport", "milliseconds"], rows),
        ]
    )


def _router(result: dict[str, Any]) -> str:
    keys = ["interval_ms", "tokens_per_s", "router_cpu_us_per_token", "tokens_per_event", "router_rss_mib"]
    return "\n".join(
        [
            "## One router process, 64 streams, workers without engines\n",
            "`interval_ms` is the pretended engine's step; at 0 it never waits. Tokens that pile up for a client go "
            "out in one event. Goal: 16,000 tokens/s.",
            _where(result, "python -m bench router"),
            _table(keys, [[run[key] for key in keys] for run in result["runs"]]),
        ]
    )


def _scheduler(result: dict[str, Any]) -> str:
    rows = [
        [store, concurrency, values["requests_per_s"], values["place_p50_ms"], values["place_p99_ms"]]
        for store, figures in result["stores"].items()
        for concurrency, values in figures.items()
    ]
    return "\n".join(
        [
            "## A placement: place, report read, report finished\n",
            "Scheduler and client share one process and its core, so this is a lower bound.",
            _where(result, "python -m bench scheduler"),
            _table(["store", "at a time", "requests/s", "place p50 ms", "p99 ms"], rows),
        ]
    )


def _scheduler_cpu(result: dict[str, Any]) -> str:
    keys = [
        "placed_per_s",
        "failed",
        "scheduler_cores",
        "redis_cores",
        "place_p50_ms",
        "place_p99_ms",
        "rss_mib",
    ]
    rows = [
        [name, rate, *(figures[key] for key in keys)]
        for name, rates in result["arms"].items()
        for rate, figures in rates.items()
    ]
    return "\n".join(
        [
            "## The scheduler over Redis: its share of a core\n",
            f"A scheduler, its Redis and a router, a process each; {result['workers']} workers; each rate was held for "
            f"{result['hold_s']:g} s. `against`: the code before a change, in turns.",
            _where(result, "python -m bench scheduler --rates 100 500 1000"),
            _table(["code", "asked a second", *keys], rows),
        ]
    )


def _startup(result: dict[str, Any]) -> str:
    rows = [[name, seconds, result["runs_s"][name]] for name, seconds in result["median_s"].items()]
    ratio = result["ratio (goal <= 1.3)"]
    return "\n".join(
        [
            "## From the command to the first token\n",
            "`baton up` starts a scheduler, two engines and a router; stock vLLM one server with one engine. "
            f"The demo model. Ratio {ratio:.2f}; goal at most 1.3.",
            _where(result, "python -m bench startup"),
            _table(
                ["", "median s", "runs s"], [[a, b, ", ".join(f"{x:.1f}" for x in c)] for a, b, c in rows]
            ),
        ]
    )


def _speculation(result: dict[str, Any]) -> str:
    rows = []
    for method, kinds in result["ms_per_token"].items():
        for kind, loads in kinds.items():
            for streams, row in loads.items():
                ms = row["ms"]
                fixed = {key: value for key, value in ms.items() if key not in ("none", "auto")}
                used = row["auto_limits"]
                usual = max(used, key=lambda limit: used[limit]) if used else ""
                cells = ", ".join(f"{key}: {value:.2f}" for key, value in fixed.items())
                auto = ms["auto"]
                rows.append(
                    [method, kind, streams, f"{ms['none']:.2f}", cells, f"{auto:.2f}", usual,
                     f"{max(row['auto_over'].values()):+.0%}", f"{ms['none'] / min(auto, *fixed.values()):.2f}"]
                )  # fmt: skip
    served = [
        [
            placement,
            method,
            kind,
            streams,
            f"{row['none']:.2f}",
            f"{row[method]:.2f}",
            f"{row['none'] / row[method]:.2f}",
        ]
        for placement, methods in result["served"].items()
        for method, kinds in methods.items()
        for kind, loads in kinds.items()
        for streams, row in loads.items()
    ]
    goals = [[name, json.dumps(value)] for name, value in result["goals"].items()]
    head = ["method", "prompts", "streams", "none", "fixed length: ms", "auto", "most used",
            "auto against the best fixed one", "best against none, times"]  # fmt: skip
    return "\n".join(
        [
            "## Speculative decoding: milliseconds a token, on the demo model\n",
            "Answers to prompts that the model was not trained on, greedy and equal to those without drafts: chat of all "
            "kinds, and tasks whose answers repeat much of the prompt (edits of code, extraction, copies). The engine "
            f"with a method and the engine without took turns, a core each, {result['rounds']} rounds; requests came as they "
            "come to a decode worker, read to their end and with their first token. The length is the number of drafted tokens a step; `auto` chooses it "
            "step by step; it is compared with each fixed length, 0 and the engine without among them, round by round: the "
            "median of the ratios to whichever fared best. With a model this small a step is mostly vLLM's own Python, with drafts as without.",
            *([result["note"]] if "note" in result else []),  # of a result that is not one run's
            _where(result, "make bench-spec"),
            _table(head, rows),
            _table(["goal", "measured"], goals),
            *(
                [
                    "Over HTTP, each method at `auto`: two cores for each side, with the router and the scheduler on the "
                    "same cores. 1P1D has an engine on each core, aggregated is one mixed worker. The deployment with a "
                    f"method and the one without took turns, {result['served_rounds']} rounds; answers of 32 tokens and more, "
                    "from the question to the last token.\n",
                    _table(["", "method", "prompts", "streams", "none", "with", "times as fast"], served),
                ]
                if served
                else []
            ),
        ]
    )


def _fair_share(result: dict[str, Any]) -> str:
    parts = [
        f"## {result['shorts']} short prompts just behind long ones, at one prefill worker\n",
        f"Long: {result['long']} tokens, short: 20 to 60. They arrive while the first long prompt's first step runs; "
        "milliseconds of the core until each first token. A flood: 40 prompts at once, one in eight of them long. "
        f"{result['rounds']} rounds of each way, in turns, in one engine. Chosen: shares of steps of 256 tokens, and the "
        "order (services/prefill/fair_share.py).",
        _where(result, "python -m bench fair_share"),
    ]
    head = ["", "short p50", "short p99", "long p50", "last long", "flood, tokens/s"]
    keys = ["short_p50_ms", "short_p99_ms", "long_p50_ms", "long_last_ms", "flood_tokens_per_s"]
    for name, behinds in result["models"].items():
        for behind, ways in behinds.items():
            rows = [[way, *(f"{figures[key]:.0f}" for key in keys)] for way, figures in ways.items()]
            parts += [f"{name}, {behind} long:\n", _table(head, rows)]
    return "\n".join(parts)


def _overload(result: dict[str, Any]) -> str:
    load, over, goals = result["load"], result["overload"], result["goals"]
    keys = ["itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_p50_ms", "answers"]
    arms = {
        "one stream alone": result["alone"],
        f"a full house ({load['slots']} streams)": result["full"],
        f"{load['times']:g} times capacity": over,
        "one stream afterwards": result["after"]["alone"],
        "a full house afterwards": result["after"]["full"],
    }
    return "\n".join(
        [
            f"## Overload: {load['times']:g} times what 1P1D can serve, {load['seconds']:.0f} s\n",
            f"The demo model; prompts of {load['prompt_tokens']} tokens, answers of {load['answer_tokens']}; capacity "
            f"{load['capacity_per_s']} answers/s in {load['slots']} slots (`max_num_seqs: {load['slots']}`), waits of "
            f"{load['wait_s']:g} s at most, {over['offered_per_s']} requests/s offered, {over['admitted_share']:.0%} let in. The others "
            f"({over['refused']}) got 503 after {over['refused_p50_ms']} ms (p50; p99 {over['refused_p99_ms']} ms), "
            f"{over['without_retry_after']} of them without Retry-After; other failures: {json.dumps(over['other'])}, broken "
            f"streams: {over['broken']}. Gap between tokens, p99, against one stream alone: "
            f"{goals['itl_p99_against_alone']} times, against a full house {goals['itl_p99_against_full']} times; goal {goals['goal']}. "
            f"Afterwards {result['after']['blocks_missing']} KV blocks were missing. The load generator shares the cores, at nice 10.",
            _where(result, "python -m bench overload"),
            _table(["", *keys], [[name, *(arm[key] for key in keys)] for name, arm in arms.items()]),
        ]
    )


def _clients(result: dict[str, Any]) -> str:
    parts = [
        "## Load tools that users have: Baton and a stock vLLM server\n",
        "Baton is `deploy/laptop.yaml`, a core for each side; the stock server has the same model without drafts, as many slots, "
        "and both cores. The tools share them, at nice 5; the two took turns. `failed` is the sum of all rounds. Closed loops of as "
        f"many clients as there may be requests on the workers, by status: {json.dumps(result['at_the_bound'])}.",
        _where(result, "python -m bench clients"),
    ]
    for tool in result["tools"].values():
        columns = tool["columns"]
        rows = [
            [name, arm, *(figures[key] for key in columns)]
            for name, arms in tool["median"].items()
            for arm, figures in arms.items()
        ]
        parts += [tool["about"] + "\n", _table(["", "", *columns], rows)]
    return "\n".join(parts)


def _soak(result: dict[str, Any]) -> str:
    keys = ["first", "warm", "last", "requests_measured", "mib_per_1000"]
    full = result["waiting_p50"] > 0
    return "\n".join(
        [
            f"## Memory over {result['requests']:,} requests{', a full house' if full else ''}\n",
            f"1P1D of the demo model with its drafts, {result['seconds']} s, {result['connections']} connections on {result['slots']} "
            f"slots, {result['waiting_p50']} waiting in the router (p50); by kind: {json.dumps(result['kinds'])}; failed: "
            f"{result['failed']}; KV blocks missing afterwards: {result['blocks_missing']}. MiB that a process has for itself; the slope "
            f"is that of the samples behind the warm-up, bound {result['bound_mib_per_1000']} MiB a thousand requests.",
            _where(result, f"python -m bench soak{' --full-house' if full else ''}"),
            _table(
                ["", *keys],
                [[name, *(row[key] for key in keys)] for name, row in result["processes"].items()],
            ),
        ]
    )


def _preload(result: dict[str, Any]) -> str:
    keys = ["tokens_per_s_1", "ms_per_token_1", "tokens_per_s_8", "ms_per_token_8"]
    rows = [
        [name, *(f"{figures[key]:.2f} ({result['ratio'][name][key]:.2f})" for key in keys)]
        for name, figures in result["median"].items()
    ]
    return "\n".join(
        [
            "## Libraries preloaded into every process of `baton up`\n",
            f"deploy/laptop.yaml, chat, answers of {result['tokens']} tokens, one stream and eight; medians of "
            f"{result['rounds']} rounds in turns, in brackets the median of each round's ratio to the first line.",
            _where(result, "python -m bench preload --tcmalloc FILE --iomp FILE"),
            _table(["", "1: tokens/s", "ms a token", "8: tokens/s", "ms a token"], rows),
        ]
    )


SECTIONS = {
    "speculation": _speculation,
    "disaggregation": _disaggregation,
    "fair-share": _fair_share,
    "path": _path,
    "handoff": _handoff,
    "router": _router,
    "scheduler": _scheduler,
    "scheduler-cpu": _scheduler_cpu,
    "startup": _startup,
    "preload": _preload,
    "clients": _clients,
    "overload": _overload,
    "soak": _soak,
    "soak-full-house": _soak,
}
