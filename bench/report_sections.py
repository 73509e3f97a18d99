"""The sections of docs/benchmarks.md: one function for each kind of result in bench/results.

Each returns the blocks of its section in order: Markdown, and figures where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.report_figures import Figure, Panel
from harness import stock

Result = dict[str, Any]
Block = str | Figure
STAGES = ("save", "wait", "move", "check", "load")
# Heads of columns, by the results' keys.
HEADS = {
    "tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "itl_max_ms": "longest gap, ms",
    "interval_ms": "step, ms",
    "router_cpu_us_per_token": "CPU a token, µs",
    "tokens_per_event": "tokens an event",
    "router_rss_mib": "RSS, MiB",
    "router_pss_mib": "PSS, MiB",
    "flush_ms": "flush, ms",
    "tokens_per_s_a_core": "tokens/s a core",
    "router_cpu_ms_a_s": "router's CPU, ms/s",
    "worker_cpu_ms_a_s": "worker's CPU, ms/s",
    "worker_rss_mib": "worker's RSS, MiB",
}


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def many(number: int, thing: str) -> str:
    """Return a number of things in words: "1 round", "3 rounds"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _heads(keys: Iterable[str]) -> list[str]:
    return [HEADS.get(key, key) for key in keys]


def measured(result: Result, usual: str) -> str:
    """Say by which command, where and when a result was taken. usual: that of one which does not tell its own."""
    command = result.get("command") or usual
    machine, tree = result["machine"], result.get("tree")  # results from before trees were noted have none
    commit = f", commit {tree['commit'][:8]}{' with changes' if tree['dirty'] else ''}" if tree else ""
    return f"`{command}`; {machine['cores']} cores ({machine['cpu']}), {machine['when']}{commit}.\n"


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in counts.items()) or "none"


def disaggregation(result: Result) -> list[Block]:
    arms, load = result["median"], result["load"]
    ours, theirs = arms["1P1D"], arms["2 aggregated"]
    rows = [
        [label, *(f"{arm[key]:.1f}" for arm in (ours, theirs)), f"{ours[key] / theirs[key]:.2f}", goal]
        for label, key, goal in (
            ("gap between a stream's tokens, p50, ms", "itl_p50_ms", ""),
            ("gap, p99, ms", "itl_p99_ms", ""),
            ("longest gap, ms", "itl_max_ms", "at most 0.2"),
            ("time to first token, short prompt, p50, ms", "ttft_short_p50_ms", "at most 2"),
            ("time to first token, long prompt, p50, ms", "ttft_long_p50_ms", ""),
            ("output tokens/s in all", "tokens_per_s", "at least 0.9"),
        )
    ]
    return [
        "## A long prompt beside running streams\n",
        "1P1D against two aggregated engines on the same two cores. "
        f"{load['streams']} closed-loop streams of {load['short_answer'][0]} to {load['short_answer'][1]} output tokens "
        f"run while prompts of {load['long_prompt']} tokens arrive at {load['long_per_s']}/s; "
        f"{many(len(result['runs']['1P1D']), 'round')} of {load['seconds']:.0f} s each. In an aggregated engine a long prompt's "
        "prefill stalls the streams beside it; in 1P1D it runs on the other worker.",
        measured(result, "python -m bench disaggregation"),
        longest_gap(result),
        table(["", "1P1D", "2 aggregated", "ratio", "goal"], rows),
    ]


def longest_gap(result: Result) -> Figure:
    """Compare the gaps between tokens of 1P1D and of two aggregated engines."""
    gaps = {"p50": "itl_p50_ms", "p99": "itl_p99_ms", "longest": "itl_max_ms"}
    names = {"1P1D (Baton)": "1P1D", "2 aggregated engines": "2 aggregated"}
    series = {name: [result["median"][arm][key] for key in gaps.values()] for name, arm in names.items()}
    return Figure(
        "longest-gap",
        "Gap between a stream's tokens while long prompts arrive: 1P1D against two aggregated engines",
        [
            Panel(
                "Gap between a stream's tokens while long prompts arrive",
                list(gaps),
                series,
                "ms (less is better)",
            )
        ],
    )


def clients(result: Result) -> list[Block]:
    blocks: list[Block] = [
        "## Load tools that users have: Baton and a stock vLLM server\n",
        "Baton is `deploy/laptop.yaml`: 1P1D with a core for each side. The stock server runs the same model without "
        f"drafts, with as many slots, on both cores {stock.told()}. The tools share the cores, at nice 5, and the two servers take turns. "
        "`failed` is the sum of all rounds. Statuses of closed loops with as many clients as the workers admit requests: "
        + "; ".join(f"{arm}: {_statuses(counts)}" for arm, counts in result["at_the_bound"].items())
        + ".",
        measured(result, "python -m bench clients"),
    ]
    for name, tool in result["tools"].items():
        columns = tool["columns"]
        rows = [
            [row, arm, *(figures[key] for key in columns)]
            for row, arms in tool["median"].items()
            for arm, figures in arms.items()
        ]
        blocks.append(tool["about"] + "\n")
        if name == "serve":
            blocks.append(_concurrency(tool["median"]))
        blocks.append(table(["", "", *_heads(columns)], rows))
    return blocks


def _statuses(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} times {status}" for status, count in counts.items())


def _concurrency(rows: dict[str, dict[str, dict[str, float]]]) -> Figure:
    def panel(title: str, key: str, axis: str, *, log: bool = False) -> Panel:
        series = {
            name: [arms[arm][key] for arms in rows.values()]
            for name, arm in (("Baton, 1P1D", "baton"), ("stock vLLM", "stock"))
        }
        return Panel(title, list(rows), series, axis, "lines", log, "concurrent requests")

    return Figure(
        "clients",
        "vllm bench serve against Baton and against stock vLLM, by concurrency",
        [
            panel("Output tokens/s", "tokens_per_s", "tokens/s"),
            panel("Time to first token, p50", "ttft_p50_ms", "ms", log=True),
            panel("Inter-token latency, p50", "itl_p50_ms", "ms"),
            panel("Inter-token latency, p99", "itl_p99_ms", "ms"),
        ],
    )


def speculation(result: Result) -> list[Block]:
    rows = []
    for method, kinds in result["ms_per_token"].items():
        for kind, loads in kinds.items():
            for streams, row in loads.items():
                ms, used = row["ms"], row["auto_limits"]
                fixed = {key: value for key, value in ms.items() if key not in ("none", "auto")}
                usual = max(used, key=lambda limit: used[limit]) if used else ""
                over, best = max(row["auto_over"].values()), ms["none"] / min(ms["auto"], *fixed.values())
                cells = _counts({key: f"{value:.2f}" for key, value in fixed.items()})
                rows.append(
                    [method, kind, streams, f"{ms['none']:.2f}", cells, f"{ms['auto']:.2f}", usual,
                     f"{over:+.0%}", f"{best:.2f}"]
                )  # fmt: skip
    head = ["method", "prompts", "streams", "none", "fixed number: ms", "auto", "most used by auto",
            "auto against the best fixed one", "times as fast as none, at best"]  # fmt: skip
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
    blocks: list[Block] = [
        "## Speculative decoding: milliseconds an output token\n",
        "The demo model, with prompts that it was not trained on; greedy answers, equal to those without drafts. Chat is of "
        "all kinds; repetitive tasks are those whose answers repeat much of the prompt (edits of code, extraction, copies).",
        *([result["note"]] if "note" in result else []),  # of a result that several runs contributed to
        measured(result, "make bench-spec"),
    ]
    if served:
        blocks += [
            "Over HTTP, each method at `auto`, on two cores for each side, which the router and the scheduler share. 1P1D has "
            "an engine on each core; aggregated is one mixed worker. The deployment with a method and the one without took "
            f"turns, {many(result['served_rounds'], 'round')}; answers of 32 tokens and more, timed from the request to the last token.\n",
            _drafts(result["served"]["1P1D"]),
            table(["", "method", "prompts", "streams", "none", "with", "times as fast"], served),
        ]
    return [
        *blocks,
        f"In one engine on a core of its own, against an engine without drafts, in turns, {many(result['rounds'], 'round')}. Requests "
        "come as a decode worker gets them: prefilled, with their first token. The fixed number is that of drafted tokens a "
        "step; `auto` chooses it step by step. It is compared round by round with whichever fared best of the fixed numbers "
        "and no drafts at all: the median of the ratios. With a model this small most of a step is vLLM's own Python, with "
        "and without drafts.\n",
        table(head, rows),
        table(["goal", "measured"], [[name, _counts(found)] for name, found in result["goals"].items()]),
    ]


def _drafts(methods: dict[str, Any]) -> Figure:
    def panel(kind: str, streams: str) -> Panel:
        rows = {method: kinds[kind][streams] for method, kinds in methods.items()}
        series = {
            "with drafts": [row[method] for method, row in rows.items()],
            "without": [row["none"] for row in rows.values()],
        }
        at_once = "1 stream" if streams == "1" else f"{streams} streams"
        return Panel(f"{kind}, {at_once}", list(rows), series, "ms an output token")

    return Figure(
        "speculation",
        "Milliseconds an output token with each speculative method and without, through 1P1D",
        [panel(kind, streams) for streams in ("1", "16") for kind in ("chat", "repetitive")],
    )


def fair_share(result: Result) -> list[Block]:
    blocks: list[Block] = [
        "## Short prompts behind long ones at one prefill worker\n",
        f"{result['shorts']} prompts of 20 to 60 tokens arrive while the first step of a prompt of {result['long']} tokens "
        "runs, with more such prompts before them in the queue or none; milliseconds of the engine core until each first "
        "token. A flood is 40 prompts at once, one in eight of them long. "
        f"{many(result['rounds'], 'round')} of each policy, in turns, in one engine. Baton's choice is the order together with shares "
        "of steps of 256 tokens (services/prefill/fair_share.py).",
        measured(result, "python -m bench fair_share"),
        _short_prompts(result["models"]),
    ]
    head = ["", "short p50", "short p99", "long p50", "last long", "flood, tokens/s"]
    keys = ["short_p50_ms", "short_p99_ms", "long_p50_ms", "long_last_ms", "flood_tokens_per_s"]
    for name, behinds in result["models"].items():
        for behind, ways in behinds.items():
            rows = [[way, *(f"{figures[key]:.0f}" for key in keys)] for way, figures in ways.items()]
            blocks += [f"{name}, {behind} long:\n", table(head, rows)]
    return blocks


def _short_prompts(models: dict[str, Any]) -> Figure:
    name, behinds = next(iter(models.items()))
    panels = [
        Panel(
            f"{name}, {behind} long",
            list(ways),
            {
                "short prompts": [figures["short_p50_ms"] for figures in ways.values()],
                "long prompts": [figures["long_p50_ms"] for figures in ways.values()],
            },
            "ms to the first token, p50",
        )
        for behind, ways in behinds.items()
    ]
    return Figure("fair-share", "Time to first token of short prompts that arrive behind long ones", panels)


def path(result: Result) -> list[Block]:
    save, *others = STAGES
    stages = [save, "sample", *others]
    rows = [
        [name, values["requests"], *(values[stage] for stage in (*stages, "total", "total_p95"))]
        for name, values in result["median_ms"].items()
    ]
    return [
        f"## The handoff of a {result['tokens']}-token prompt in a 1P1D deployment\n",
        "Milliseconds from the end of the prefill's last step until the decode engine can take the request, and the save, a part "
        "of that step. `sample` is the rest of that step after the save, the logits and the first token, and not in `total`; what "
        "was pulled while the prompt was prefilled costs nothing here. Besides the stages, `total` holds the word from one worker "
        "to the other and the time until the engine's next step; busy: four streams decode meanwhile. Goals, idle: 5 ms over "
        "shm, 6 ms over TCP and NIXL; busy: 5 ms more than a decode step, which takes some 20 ms here.",
        measured(result, "python -m bench path"),
        table(["", "prompts", *stages, "total", "total p95"], rows),
    ]


def watched(result: Result) -> list[Block]:
    names = {
        "tokens_per_s": "tokens/s",
        "ttft_short_p50_ms": "TTFT p50, short prompts, ms",
        "ttft_long_p50_ms": "TTFT p50, 900 tokens, ms",
        "itl_p50_ms": "ITL p50, ms",
        "itl_p99_ms": "ITL p99, ms",
    }
    rows = [
        [
            name,
            result["medians"]["off"][key],
            result["medians"]["on"][key],
            f"{100 * result['change'][key]:+.1f} %",
        ]
        for key, name in names.items()
    ]
    return [
        "## What it costs to be watched\n",
        "1P1D, four streams beside long prompts, in turns. On: Prometheus with all rules scrapes each process every five seconds, "
        f"requests are traced (one in a hundred, and slow ones: {result['traces']} traces), and somebody reads the live page; all of "
        f"them on the same cores. Goal: {100 * result['goal']:.0f} % of tokens/s and of the time to first token. "
        f"Medians of {len(result['runs']['on'])} turns.",
        measured(result, "python -m bench watched"),
        table(["", "off", "on", "change"], rows),
    ]


def early(result: Result) -> list[Block]:
    keys = ("mib", "early", "left_mib", "rest_ms", "rest_p95_ms", "second_token_ms")
    rows = [
        [
            arm,
            steps,
            f"{found['mib']:.1f}",
            f"{100 * found['early']:.1f} %",
            f"{found['left_mib']:.2f}",
            *(f"{found[key]:.1f}" for key in keys[3:]),
        ]
        for arm, lengths in result["arms"].items()
        for steps, found in lengths.items()
    ]
    return [
        "## Handoffs that begin with their prompt\n",
        f"Prompts of so many steps of {result['step_tokens']} tokens where nothing else is said, one at a time, in 1P1D. Early: KV that the decode worker had "
        "before it heard that the prompt was complete. The rest: from the end of the prefill's last step until the decode engine "
        "can take the request, ms (over 1 Gbit/s: from when the decode worker hears of that end); then the client's wait between "
        "its first two tokens. Goal: "
        f"{100 * result['goal']:.0f} % early from {result['goal_steps']} steps on.",
        measured(result, "python -m bench early"),
        table(
            ["", "steps", "MiB", "early", "MiB left", "rest", "rest p95", "second token after"],
            rows,
        ),
    ]


def first_drafts(result: Result) -> list[Block]:
    keys = ("first_token_ms", "second_token_ms", "third_token_ms")
    rows = [
        [drafts, f"{found['first_step_tokens']:.2f}", *(f"{found[key]:.1f}" for key in keys)]
        for drafts, found in result["arms"].items()
    ]
    return [
        "## Drafts that come with a handoff\n",
        f"{result['prompts']} chat prompts with the demo model and its MTP layer, one at a time, prefilled and handed over with so many "
        "drafts, in turns; answers are equal. The first token counts from the prefill's begin, the others from the decode side's, the "
        "load included; medians, ms, in the engine. Each decode step drafts "
        f"{result['in_force']} tokens. Tokens of the first decode step: means.",
        measured(result, "python -m bench first-drafts"),
        table(["drafts", "tokens of the first step", "first token", "second", "third"], rows),
    ]


def window(result: Result) -> list[Block]:
    large, small = result["staging_mib"].values()
    rows = []
    for way, found in result["ways"].items():
        total, step = found["total_ms"], found["step_ms"]
        rows.append(
            [
                way,
                f"{total['large']['p50']:.1f}",
                f"{total['small']['p50']:.1f}",
                f"{total['ratio']['p50']:.2f} ({total['ratio']['p25']:.2f} to {total['ratio']['p75']:.2f})",
                f"{step['large']['p50']:.2f}",
                f"{step['small']['p50']:.2f}",
            ]
        )
    return [
        "## A prompt larger than staging\n",
        f"{result['prompt_mib']} MiB of KV between two processes without engines, staging of {large} MiB and of {small} MiB (a window of "
        f"{small // 4}) in turns, medians of {many(result['rounds'], 'round')}, ms. Whole: saved, and then pulled. Early: in steps of "
        f"{result['step_tokens']} tokens, one every {result['step_s'] * 1e3:.0f} ms, and pulled meanwhile; from the begin of the last step's "
        "save until all is loaded. Step: what the engine's thread spends on a save. The ratio is that of each round, with its quartiles.",
        measured(result, "python -m bench window"),
        table(
            ["", f"{large} MiB", f"{small} MiB", "ratio", f"step, {large} MiB", f"step, {small} MiB"], rows
        ),
    ]


def attribution(result: Result) -> list[Block]:
    loads = result["loads"]
    rows = [
        [
            name,
            group,
            load["requests"],
            load["killed"],
            f"{load[group]['ttft_ms']:.1f}",
            f"{100 * load[group]['share']:.1f} %",
        ]
        for name, load in loads.items()
        for group in ("p50", "p99")
    ]
    stages = list(dict.fromkeys(stage for load in loads.values() for stage in load["p99"]["stages_ms"]))
    spent = [
        [name, group, *(f"{load[group]['stages_ms'].get(stage, 0.0):.2f}" for stage in stages)]
        for name, load in loads.items()
        for group in ("p50", "p99")
    ]
    parts = [
        [
            name,
            load["itl"]["samples"],
            load["itl"]["p50_ms"],
            load["itl"]["p99_ms"],
            *load["itl"]["parts_mean_ms"].values(),
        ]
        for name, load in loads.items()
    ]
    return [
        "## Where the time to first token goes\n",
        "1P1D; each request's stages, as the router tells them, against what its client measured until the first event of its "
        "stream. p50: the requests around the median; p99: the slowest hundredth. Idle: one request at a time; busy: four "
        "streams beside long prompts; kills: the same, while decode and prefill worker are killed in turns. Goal: "
        f"{100 * result['goal']:.0f} % of that time.",
        measured(result, "python -m bench attribution"),
        table(["", "", "requests", "killed", "TTFT, ms", "attributed"], rows),
        "Milliseconds by stage:\n",
        table(["", "", *stages], spent),
        "The gap between tokens, and the mean way of a sample of tokens, ms:\n",
        table(["", "samples", "gap p50", "gap p99", "engine", "wire", "router", "client"], parts),
    ]


def handoff(result: Result) -> list[Block]:
    keys = ["MB", *(f"{stage}_ms" for stage in STAGES), "pull_ms", "total_ms", "total_p95_ms"]
    rows = [
        [tokens, name, *(values[key] for key in keys)]
        for tokens, transports in result["tokens"].items()
        for name, values in transports.items()
    ]
    panels = [
        Panel(
            f"{tokens} tokens",
            list(transports),
            {stage: [values[f"{stage}_ms"] for values in transports.values()] for stage in STAGES},
            "ms",
            "stacked",
        )
        for tokens, transports in result["tokens"].items()
    ]
    return [
        "## The handoff alone, between two processes without engines\n",
        "Milliseconds by stage, for a prompt of so many tokens, by transport and by the format of KV on the wire. "
        "`total` also holds the time between the stages.",
        measured(result, "python -m bench handoff"),
        Figure("handoff", "Milliseconds of a handoff by stage, transport and format", panels),
        table(["tokens", "transport", "MB", *STAGES, "pull", "total", "total p95"], rows),
    ]


def router(result: Result) -> list[Block]:
    keys = ["interval_ms", "tokens_per_s", "router_cpu_us_per_token", "tokens_per_event", "router_rss_mib"]
    labels = [f"{run['interval_ms']:g} ms" for run in result["runs"]]
    tokens = [run["tokens_per_s"] for run in result["runs"]]
    return [
        "## One router process, 64 streams, workers without engines\n",
        "The workers send a token per stream at each step; with a step of 0 ms they never wait. Tokens that pile up for a client leave "
        "in one event. Goal: 16,000 tokens/s.",
        measured(result, "python -m bench router"),
        Figure(
            "router",
            "Output tokens/s that one router process carries, by the engines' step",
            [
                Panel(
                    "One router process, by the engines' step",
                    labels,
                    {"router": tokens},
                    "tokens/s",
                    goal=16_000,
                )
            ],
        ),
        table(_heads(keys), [[run[key] for key in keys] for run in result["runs"]]),
    ]


def router_processes(result: Result) -> list[Block]:
    keys = ["processes", "flush_ms", "tokens_per_s", "router_cpu_us_per_token", "tokens_per_s_a_core"]
    keys += ["tokens_per_event", "router_rss_mib", "router_pss_mib"]
    return [
        "## Several router processes, and tokens that wait for more\n",
        f"The same load, a step of {result['interval_ms']:g} ms: `router.processes` and `router.flush_ms`, in {result['rounds']} turns; "
        "medians. A core's tokens/s are by the CPU time of all processes of the router, the parent's included. Goal: 16,000.",
        measured(result, "python -m bench router --processes 1 2"),
        table(_heads(keys), [[run[key] for key in keys] for run in result["arms"]]),
    ]


def idle_streams(result: Result) -> list[Block]:
    keys = ["streams", "router_cpu_ms_a_s", "router_rss_mib", "worker_cpu_ms_a_s", "worker_rss_mib"]
    return [
        "## Streams that carry nothing\n",
        "A router process with so many streams to workers, a worker with so many from router processes; a sign of life each second.",
        measured(result, "python -m bench idle-streams"),
        table(_heads(keys), [[run[key] for key in keys] for run in result["runs"]]),
    ]


def tracing(result: Result) -> list[Block]:
    off = result["shares"]["off"]["router_cpu_us_per_token"]
    rows = [
        [
            name,
            run["router_cpu_us_per_token"],
            f"{run['router_cpu_us_per_token'] / off:.3f}",
            "{} to {}".format(*run["router_cpu_us_from_to"]),
            run["tokens_per_s"],
            run["traced"],
        ]
        for name, run in result["shares"].items()
    ]
    return [
        "## The cost of traces\n",
        f"The same router, 64 streams of {result['tokens']} tokens, a step of {result['interval_ms']:g} ms; so many of the requests "
        "are traced, in turns. Medians; how far turns of one kind lie apart says what a difference means. Goal: 2 % at 1 %.",
        measured(result, "python -m bench router --sample 0.01 1 --tokens 2000"),
        table(["traced", "CPU a token, µs", "against off", "turns, µs", "tokens/s", "traces"], rows),
    ]


def scheduler(result: Result) -> list[Block]:
    """Render placements by real schedulers."""
    keys = [
        *("placed_per_s", "failed", "place_p50_ms", "place_p99_ms", "own_p50_ms", "own_p99_ms", "cpu_us"),
        *("redis_us", "late_p99_ms", "fast_placed_per_s", "fast_place_p50_ms", "fast_cpu_us", "idle_cores"),
    ]
    several = len(result["arms"]) > 1
    rows = [
        [arm, *([code] if several else []), *(figures[key] for key in keys)]
        for arm in result["arms"]["here"]
        for code, figures in ((code, arms[arm]) for code, arms in result["arms"].items())
    ]
    against = " `against` is the code before a change, in turns." if several else ""
    return [
        "## The scheduler: place, report the prefill, report the end\n",
        "Schedulers, Redis, fake workers with heartbeats (one in five seconds each) and routers' clients are processes of their own, on "
        f"the same cores. First {result['rate']:g} requests a second come at random times, for {result['seconds']:g} s; then as "
        f"many as there can be (`fast`).{against} `place` is what a router waits (mostly for cores, where other work shares them), `own` the part of it in the scheduler; `late` is "
        "by how much a router's process woke up after its time. CPU is that of all schedulers for each placement with its reports, "
        "less what they need without placements (`idle_cores`). `stopped` is a Redis that hangs from the middle of the first part on. Of "
        f"{many(result['rounds'], 'round')} the least disturbed one counts, by its p50.",
        measured(result, "python -m bench scheduler"),
        table(["deployment", *(["code"] if several else []), *keys], rows),
    ]


def overload(result: Result) -> list[Block]:
    load, over, goals = result["load"], result["overload"], result["goals"]
    keys = ["itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_p50_ms", "answers"]
    arms = {
        "one stream alone": result["alone"],
        f"a full house ({load['slots']} streams)": result["full"],
        f"{load['times']:g} times capacity": over,
        "one stream afterwards": result["after"]["alone"],
        "a full house afterwards": result["after"]["full"],
    }
    gaps = {
        "p50": [arm["itl_p50_ms"] for arm in arms.values()],
        "p99": [arm["itl_p99_ms"] for arm in arms.values()],
    }
    return [
        f"## Overload: {load['times']:g} times what 1P1D can serve, for {load['seconds']:.0f} s\n",
        f"The demo model, prompts of {load['prompt_tokens']} tokens, answers of {load['answer_tokens']}. Capacity is "
        f"{load['capacity_per_s']} answers/s in {load['slots']} slots (`max_num_seqs: {load['slots']}`), and a request waits "
        f"for {load['wait_s']:g} s at most. {over['offered_per_s']} requests/s were offered and {over['admitted_share']:.0%} of "
        f"them admitted; the other {over['refused']:,} got 503 after {over['refused_p50_ms']} ms (p50; p99 "
        f"{over['refused_p99_ms']} ms), {over['without_retry_after']} of them without Retry-After. Other failures: "
        f"{_counts(over['other'])}; broken streams: {over['broken']}. The gap between tokens at p99 was "
        f"{goals['itl_p99_against_alone']} times that of one stream alone and {goals['itl_p99_against_full']} times that of a "
        f"full house; goal {goals['goal']}. {result['after']['blocks_missing']} KV blocks were missing afterwards. The load "
        "generator shares the cores, at nice 10.",
        measured(result, "python -m bench overload"),
        Figure(
            "overload",
            "Gap between tokens of admitted requests, before, during and after overload",
            [Panel("Gap between tokens of admitted requests", list(arms), gaps, "ms")],
        ),
        table(["", *_heads(keys)], [[name, *(arm[key] for key in keys)] for name, arm in arms.items()]),
    ]


def flood(result: Result) -> list[Block]:
    felt, held = result["felt"], result["held"]
    keys = ["ttft_p50_ms", "ttft_p99_ms", "answers", "not_answered"]
    words = {"requests_per_s": "requests a second", "tokens_per_min": "tokens a minute"}
    rates = [
        [
            words[field],
            one["limit"],
            one["sent"],
            one["statuses"].get("200", 0),
            one["allowed"],
            f"{one['off']:+.1%}",
        ]
        for field, one in held.items()
        if field in words
    ]
    crowd = held["concurrency"]
    others = "; ".join(
        f"`{arm}`: {one['sent']:,} sent, {_statuses(one['statuses'])}" for arm, one in felt["other"].items()
    )
    ratios = " and ".join(
        f"{one['ratio']} times that of `{arm}` ({one['low']} to {one['high']})"
        for arm, one in felt["ttft_p99_against"].items()
    )
    cpu, refused = (
        felt["router_cpu_s"],
        {arm: one["statuses"].get("429", 0) for arm, one in felt["other"].items()},
    )
    within, flooded = felt["other"]
    each_us = 1e6 * (cpu[flooded] - cpu[within]) / (refused[flooded] - refused[within])
    return [
        f"## A tenant that floods at {result['times']} times its limit\n",
        f"1P1D of the demo model. One tenant sends {felt['calm_per_s']:g} requests a second at random times, the same in each "
        "arm of a round; in turns it is alone, or another tenant sends as many requests as its limit of "
        f"{felt['limit_per_s']} a second admits, or {result['times']} times as many ({others}); "
        f"{many(felt['rounds'], 'round')} of {felt['seconds']:g} s each. A refusal took "
        f"{felt['other'][flooded]['refused_p50_ms']} ms (p50) and {each_us:.0f} µs of the router's CPU. Beside the flood the time to first token at p99 was "
        f"{ratios}; in brackets nine in ten of the samples, when rounds are drawn anew. Goal: {felt['goal']} times that of "
        "`alone`.",
        measured(result, "python -m bench flood"),
        table(
            ["", *_heads(keys)], [[name, *(arm[key] for key in keys)] for name, arm in felt["arms"].items()]
        ),
        "Through two routers that share limits in Redis, in front of a worker without an engine; `allowed` is the rate times "
        "the seconds, and one full bucket:\n",
        table(["limit", "of", "sent", "admitted", "allowed", "off"], rows=rates),
        f"Of at most {crowd['limit']} requests at a time, {crowd['p99']} were under way for 99 % of the time ({crowd['usual']} usually; {crowd['peak']} for a moment, as a client saw it that is late itself), "
        f"of {crowd['sent']:,} that were sent. Goal for all limits: {crowd['goal']:.0%}.\n",
    ]


def startup(result: Result) -> list[Block]:
    median = result["median_s"]
    rows = [
        [name, seconds, ", ".join(f"{one:.1f}" for one in result["runs_s"][name])]
        for name, seconds in median.items()
    ]
    ratio = result["ratio (goal <= 1.3)"]
    return [
        "## From the command to the first token\n",
        "`baton up` starts a scheduler, two engines and a router; stock vLLM one server with one engine "
        f"{stock.told()}. The demo model. Ratio {ratio:.2f}; goal at most 1.3.",
        measured(result, "python -m bench startup"),
        Figure(
            "startup",
            "Seconds from the command to the first token: baton up against stock vLLM",
            [
                Panel(
                    "From the command to the first token",
                    ["median"],
                    {name: [seconds] for name, seconds in median.items()},
                    "s",
                )
            ],
        ),
        table(["", "median s", "runs s"], rows),
    ]


def autoscale(result: Result) -> list[Block]:
    goals, service, decision = result["goals"], result["service"], result["decision_ms"]
    columns = ("mean_workers", "within_percent", "first_token_percent", "gap_percent")
    rows = [
        *(
            [f"autoscaled, a worker starts in {start} s", *(run[key] for key in columns)]
            for start, run in result["autoscaled"].items()
        ),
        *([f"fixed, {name}", *(run[key] for key in columns)] for name, run in result["fixed"].items()),
    ]
    phases = ", then ".join(
        f"{one['name']} ({one['per_s']:g}/s, prompts of {one['prompt']}, answers of {one['answer']} tokens)"
        for one in result["phases"]
    )
    minutes = [f"{at / 60:.2f}" for at, _, _ in result["counts"]]
    counts = {
        "prefill workers": [float(prefill) for _, prefill, _ in result["counts"]],
        "decode workers": [float(decode) for _, _, decode in result["counts"]],
    }
    errors = ", ".join(
        f"{what} {error['median']} (mean {error['mean']})"
        for what, error in result["prediction_error_percent"].items()
    )
    return [
        "## Autoscaling, simulated\n",
        f"Simulated, by the product's own controller: {result['requests']:,} requests, {phases}, each for five minutes. A worker "
        f"prefills {service['prefill_tokens_per_s']:,} tokens/s; with n requests its gap between tokens is "
        f"{1e3 * service['gap']['base']:.1f} + {1e3 * service['gap']['slope']:.2f} n ms, as `clients` measured. Goals for each "
        f"request: first token within {goals['first_token_s']:g} s, mean gap within {1e3 * goals['gap_s']:g} ms. Of each number "
        "of fixed workers, the best split is shown.",
        measured(result, "python -m bench autoscale"),
        Figure(
            "autoscale",
            "Numbers of prefill and decode workers over time as a simulated load doubles, halves and changes its kind",
            [
                Panel(
                    "Workers over time (simulated)",
                    minutes,
                    counts,
                    "workers",
                    "steps",
                    labels_axis="minutes",
                )
            ],
            columns=1,
        ),
        table(["", "workers, mean", "within both, %", "first token, %", "gap, %"], rows),
        f"Median error of the predictions for 30 s, per cent (shares: points): {errors}. Every change of the load "
        "counts: it cannot be foreseen.\n",
        f"A decision at {decision['workers']:,} workers and {decision['routers']} routers takes {decision['p50']} ms of CPU (p50), "
        f"{decision['max']} ms at most, every two seconds, in a thread beside the scheduler's loop.\n",
    ]


def ray_autoscale(result: Result) -> list[Block]:
    heads = {
        "mode": "",
        "mean_workers": "workers, mean",
        "within_percent": "within both, %",
        "first_token_percent": "first token, %",
        "gap_percent": "gap, %",
        "requests": "requests",
        "failed": "failed",
    }
    phases = [phase["name"] for phase in result["phases"]]
    arms = {
        "the scheduler chooses (on)" if name == "on" else f"fixed, {name}": figures
        for name, figures in result["arms"].items()
    }
    whole = [[name, *(figures[key] for key in list(heads)[1:])] for name, figures in arms.items()]
    by_phase = [
        [name, *(figures["by_phase"].get(phase, "-") for phase in phases)] for name, figures in arms.items()
    ]
    said = "; ".join(
        f"{one['name']}: {one['seconds']:g} s, {one['per_s']:g}/s, prompts of {one['prompt']}, answers of {one['answer']}"
        for one in result["phases"]
    )
    advised = [
        f"{name}: "
        + ", ".join(f"{what} {error}" for what, error in figures["prediction_error_percent"].items())
        + f" ({figures['predictions']} predictions)"
        for name, figures in arms.items()
        if figures["predictions"]
    ]
    scaled = result["arms"].get("on")
    blocks: list[Block] = [
        "## Autoscaling on Ray\n",
        f"`baton ray up` on Ray's fake multi-node provider, whose nodes come and go; the head has room for two workers. "
        f"Workers of the demo model, each held to {result['share']:g} of a core once it serves. Goals for each request: first token "
        f"within {result['goals']['ttft_ms'] / 1e3:g} s, mean gap within {result['goals']['itl_ms']:g} ms. The same requests in "
        f"each arm ({said} tokens). Workers count from when they have room.",
        measured(result, "python -m bench ray-autoscale"),
    ]
    if scaled:
        orders = _counts(scaled["orders"])
        blocks += [_ray_workers(scaled["counts"]), f"Orders of the scheduler: {orders}.\n"]
    return [
        *blocks,
        table(list(heads.values()), whole),
        "Within both goals by phase, per cent:\n",
        table(["", *phases], by_phase),
        f"Median error of the predictions for 30 s, per cent (shares: points); fixed numbers are advised on. {'; '.join(advised)}.\n",
    ]


def _ray_workers(counts: list[list[float]]) -> Figure:
    """Draw the numbers of workers that serve, at the moments when one of them changed."""
    kept = [
        now
        for before, now, after in zip([None, *counts], counts, [*counts[1:], None], strict=False)
        if before is None or after is None or now[1:3] != before[1:3]
    ]
    series = {
        "prefill workers": [float(one[1]) for one in kept],
        "decode workers": [float(one[2]) for one in kept],
    }
    return Figure(
        "ray-autoscale",
        "Prefill and decode workers over time on Ray as the load doubles, halves and changes its kind",
        [
            Panel(
                "Workers that serve, over time (Ray)",
                [f"{one[0]:g}" for one in kept],
                series,
                "workers",
                "steps",
                labels_axis="seconds",
            )
        ],
        columns=1,
    )


def soak(result: Result) -> list[Block]:
    keys = ["first", "warm", "last", "requests_measured", "mib_per_1000"]
    full = result["waiting_p50"] > 0
    return [
        f"## Memory over {result['requests']:,} requests{', in a full house' if full else ''}\n",
        f"1P1D of the demo model with its drafts, {result['seconds']} s, {result['connections']} connections on "
        f"{result['slots']} slots, {_waiting(result)} waiting in the router; by kind: {_counts(result['kinds'])}; "
        f"failed: {result['failed']}; KV blocks missing afterwards: {result['blocks_missing']}. Anonymous memory of a process "
        "and its children, MiB; the slope is the median of those between the samples after the warm-up, with a bound of "
        f"{result['bound_mib_per_1000']} MiB a thousand requests.",
        measured(result, f"python -m bench soak{' --full-house' if full else ''}"),
        table(
            ["", *keys], [[name, *(row[key] for key in keys)] for name, row in result["processes"].items()]
        ),
    ]


def _waiting(result: Result) -> str:
    if "waiting_p10" not in result:
        return f"{result['waiting_p50']} (p50)"
    return (
        f"{result['waiting_p50']} (p50; p10 {result['waiting_p10']}, none in {result['waiting_none']:.0%} of "
        f"{result['waiting_samples']} samples)"
    )


def tls(result: Result) -> list[Block]:
    handoffs, calls, served, rotation = (
        result["handoff"]["tokens"],
        result["handoff"]["calls"],
        result["served"],
        result["rotation"],
    )
    rows: list[list[Any]] = []
    for tokens, row in handoffs.items():
        what = f"{int(tokens):,} tokens, {row['MiB']} MiB"
        rows += [
            [f"{what}: moved, ms", *_compared(row["move_ms"])],
            [f"{what}: from save to load, ms", *_compared(row["total_ms"])],
        ]
    rows += [
        ["a small call, ms", *_compared(calls["call_ms"])],
        ["connecting, with its first call, ms", *_compared(calls["connect_ms"])],
    ]
    for streams, row in served["streams"].items():
        at_once = "1 stream" if streams == "1" else f"{streams} streams"
        rows += [
            [f"1P1D, {at_once}: tokens/s", *_compared(row["tokens_per_s"])],
            [f"1P1D, {at_once}: TTFT, ms", *_compared(row["ttft_ms"])],
        ]
    speeds = ", ".join(
        f"{int(tokens):,} tokens at {_mib_per_s(row, 'plain')} and {_mib_per_s(row, 'tls')} MiB/s"
        for tokens, row in handoffs.items()
    )
    over = result["handoff"].get("transport", "gRPC")
    return [
        "## Mutual TLS\n",
        "Plain text and TLS in turns, A B B A; in brackets the quartiles. The ratio is TLS to plain, taken pair by pair; "
        "where its quartiles lie on both sides of 1 the two cannot be told apart. Both ends share the machine's cores, with "
        f"no network between them that would hide the cost. Handoffs over {over} are between two processes without engines, "
        f"{result['handoff']['rounds']} of each: {speeds} (plain, TLS). 1P1D hands every prompt over by {over}: "
        f"{served['rounds']} deployments of each, prompts of {served['prompt_tokens']} tokens and answers of {served['answer_tokens']}. "
        "Shared memory is not encrypted and pays nothing.",
        measured(result, "python -m bench tls"),
        table(["", "plain", "TLS", "ratio"], rows),
        f"Certificates that live for {rotation['life_s']} s, from `baton ca serve`, under {rotation['clients']} clients for "
        f"{rotation['seconds']:g} s, every token checked: replaced {_counts(rotation['rotations'])} times "
        f"({rotation['missed']} tries missed); {rotation['requests']} requests, {rotation['tokens']:,} tokens, "
        f"failed: {rotation['failed']}, wrong: {rotation['wrong']}.\n",
    ]


def _compared(figures: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"{_short(one['p50'])} ({_short(one['p25'])} to {_short(one['p75'])})" for one in figures.values()
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mib_per_s(row: dict[str, Any], arm: str) -> str:
    return f"{1e3 * row['MiB'] / row['move_ms'][arm]['p50']:,.0f}"


def ray_hosts(result: Result) -> list[Block]:
    heads = {
        "noticed_s": "noticed and told, s",
        "dead_s": "found dead by Ray, s",
        "joined_s": "a new host starts Ray, s",
        "room_s": "its worker has room, s",
        "back_s": "its worker is ready, s",
        "requests": "requests",
        "while_away": "of them until then",
        "failed": "failed",
        "wrong": "wrong tokens",
        "refused": "refused (503)",
        "longest_pause_s": "longest pause of a stream, s",
    }
    rows = [[arm, *(figures.get(key, "-") for key in heads)] for arm, figures in result["arms"].items()]
    return [
        "## A host of a Ray cluster that dies under load\n",
        f"Prefill on one host, decode on another, in network namespaces with a core each; {result['clients']} clients that "
        "always ask, with the model's own drafts, greedy, and each token is compared with the answer before. All processes "
        "of the decode host are killed at once. Seconds from then on. In `spare` a third host with room is there already, "
        "in `joins` it starts Ray once the second is found dead, on the same core. `quick` has Ray's health checks every "
        "second, with an answer in 2 s, three times.",
        measured(result, "python -m bench hosts"),
        table(["", *heads.values()], rows),
    ]


def links(result: Result) -> list[Block]:
    wires = {
        "requests": "requests",
        "failed": "failed",
        "wrong": "wrong",
        "handoffs": "handoffs",
        "handoff_p50_ms": "handoff p50, ms",
        "handoff_p99_ms": "p99, ms",
        "ttft_p50_ms": "TTFT p50, ms",
        "ttft_p99_ms": "p99, ms",
        "itl_p50_ms": "between pieces p50, ms",
        "itl_p99_ms": "p99, ms",
    }
    cuts = {
        "requests": "requests",
        "while_cut": "of them while cut",
        "failed": "failed",
        "wrong": "wrong",
        "refused": "503, then sent again",
        "longest_pause_s": "longest pause, s",
        "ttft_p50_ms": "TTFT p50 of those begun and ended while cut, ms",
        "attempts_more": "placed again",
        "used_again_s": "used again after, s",
    }

    def cell(value: Any) -> Any:
        return "-" if value is None else value

    stages = [
        [name, *(one["stage_mean_ms"][stage] for stage in STAGES)] for name, one in result["wires"].items()
    ]
    return [
        "## Wires that are not ideal\n",
        "2P2D, the scheduler and the router, each on a host of its own in a network namespace, over mutual TLS, with the "
        f"model's own drafts; {result['clients']} clients that always ask, greedy, and each token is compared with the answer of "
        "one vLLM engine. Every prompt is handed over. Delay and loss are each way, of every frame (1,500 bytes); the rate is "
        f"what a host sends. {0.75 * result['seconds']:g} s of each. The handoff is from the first token until the decode worker has "
        "the KV cache.",
        measured(result, "python -m bench links"),
        table(
            ["wire", *wires.values()],
            [[name, *(cell(one[key]) for key in wires)] for name, one in result["wires"].items()],
        ),
        "Stages of a handoff, means, ms; `move` is the wire's:\n",
        table(["wire", *STAGES], stages),
        f"Nothing passes between the hosts of some pairs for {result['seconds']:g} s, and nobody is told. Where a path is left, "
        "no request may fail.\n",
        table(
            ["cut", "a path is left", *cuts.values()],
            [
                [name, "yes" if one["path_left"] else "no", *(cell(one[key]) for key in cuts)]
                for name, one in result["cuts"].items()
            ],
        ),
    ]


def preload(result: Result) -> list[Block]:
    keys = ["tokens_per_s_1", "ms_per_token_1", "tokens_per_s_8", "ms_per_token_8"]
    rows = [
        [name, *(f"{figures[key]:.2f} ({result['ratio'][name][key]:.2f})" for key in keys)]
        for name, figures in result["median"].items()
    ]
    return [
        "## Libraries preloaded into every process of `baton up`\n",
        f"deploy/laptop.yaml, chat, answers of {result['tokens']} tokens, one stream and eight; medians of "
        f"{many(result['rounds'], 'round')} in turns, in brackets the median of each round's ratio to the first line. Baton preloads "
        "nothing.",
        measured(result, "python -m bench preload --tcmalloc FILE --iomp FILE"),
        table(["", "1: tokens/s", "ms a token", "8: tokens/s", "ms a token"], rows),
    ]


# By the name of the result's file, in the order of the page.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {
    "disaggregation": disaggregation,
    "clients": clients,
    "speculation": speculation,
    "fair-share": fair_share,
    "attribution": attribution,
    "path": path,
    "early": early,
    "first-drafts": first_drafts,
    "window": window,
    "watched": watched,
    "handoff": handoff,
    "tls": tls,
    "router": router,
    "router-processes": router_processes,
    "idle-streams": idle_streams,
    "tracing": tracing,
    "scheduler": scheduler,
    "autoscale": autoscale,
    "ray-autoscale": ray_autoscale,
    "overload": overload,
    "flood": flood,
    "startup": startup,
    "ray-hosts": ray_hosts,
    "links": links,
    "soak": soak,
    "soak-full-house": soak,
    "preload": preload,
}
