"""The sections of docs/benchmarks.md about placement by prefixes and large fleets."""

from __future__ import annotations

from collections.abc import Callable

from bench.report_sections import Block, Result, many, measured, table


def prefixes(result: Result) -> list[Block]:
    hashing = result["hashing"]
    index = [
        *("blocks", "operations_a_s", "message_ms", "look_ups_a_s", "decision_p50_us"),
        *("decision_p99_us", "decisions_a_s", "worker_gone_ms"),
    ]
    sizes = ["gib", "bytes_a_block", "operations_a_s", "look_up_us"]
    turns = ["place_p50_ms", "place_p99_ms", "requests_a_core_s"]
    views = ["whole_bytes", "bytes_a_router_s", "scheduler_cores", "router_ms_a_s"]
    return [
        "## Where prefixes lie: the cost of knowing\n",
        f"Prompts of {result['prompt_tokens']:,} tokens, blocks of {result['block_tokens']}. A router hashes such a prompt in "
        f"{hashing['whole_prompt_ms']:g} ms, a chat's next turn in {hashing['next_turn_ms']:g} ms, and adds "
        f"{hashing['bytes_in_a_placement']:,} bytes to the placement. By number of workers, the index and the choice:",
        measured(result, "python -m bench prefixes"),
        table(
            ["workers", *index],
            [[name, *(_number(one[key]) for key in index)] for name, one in result["index"].items()],
        ),
        "The index of 1,000 workers by number of blocks: its memory, and the time of an operation and of a look-up in it.\n",
        table(
            ["blocks", *sizes],
            [[name, *(_number(one[key]) for key in sizes)] for name, one in result["sizes"].items()],
        ),
        "A turn of a chat whose prompt grew to that length, from the tokens to the booking: hashes, gRPC, choice. The percentiles "
        "are of one at a time; requests are those a second of CPU of router and scheduler together, 32 at a time, without heartbeats.\n",
        table(
            ["workers", *turns],
            [[name, *(_number(one[key]) for key in turns)] for name, one in result["turns"].items()],
        ),
        "What 100 routers are told of the fleet each second, while every worker has something new in each second: all that "
        "there is in bytes, what each router gets of it, what that costs the scheduler, and what it costs a router.\n",
        table(
            ["workers", *views],
            [[name, *(_number(one[key]) for key in views)] for name, one in result["views"].items()],
        ),
    ]


def faults(result: Result) -> list[Block]:
    load = result["load"]
    rows = [
        [
            name,
            *(", ".join(f"{one:g}" for one in found[key]) for key in ("slow", "last_slow_after_s")),
            *(found[key] for key in ("ttft_p50_ms", "wrong")),
        ]
        for name, found in result["faults"].items()
    ]
    messages = ", ".join(f"{fate} {beats}" for fate, beats in result["messages"].items())
    without = next(iter(result["faults"].values()))["ttft_without_cache_p50_ms"]
    return [
        "## Where prefixes lie: after faults\n",
        f"2P2D; {load['prompts']} prompts of {load['tokens']} tokens that one prefill worker each has cached, asked for once more, "
        f"{load['per_s']:g} a second, from the fault on. Slow are first tokens that took more than half of the {without:g} ms that "
        "it takes without a cache: their prompts were computed again, or waited for what died. The last of them was asked so many "
        "seconds after the fault. By round. One message about a cache that fares badly leaves the scheduler without what is in it "
        f"for so many heartbeats: {messages}.",
        measured(result, "python -m bench prefix-faults"),
        table(["", "slow first tokens", "last after, s", "TTFT p50, ms", "wrong answers"], rows),
    ]


def chats(result: Result) -> list[Block]:
    turns = [f"turn {number}" for number in range(1, result["turns"] + 1)]
    rows = [
        [fleet, arm, what, *(f"{value:,.0f}" for value in figures[key]), last]
        for fleet, found in result["fleets"].items()
        for arm, figures in found["arms"].items()
        for what, key, last in (
            ("TTFT, ms", "ttft_ms", f"{figures['last_to_first']:g}"),
            ("computed by prefill workers", "prefill_computed", ""),
            ("computed by decode workers", "decode_computed", ""),
        )
    ]
    equal = ", ".join(
        f"{found['equal']} of {found['answers']} in {fleet}" for fleet, found in result["fleets"].items()
    )
    return [
        "## Chats\n",
        f"Chats of {result['turns']} turns: each adds a message of {result['message']} tokens and an answer of "
        f"{result['answer']}. The decode worker holds what was said before; `on` is `scheduler.prefix_pull_s: "
        f"{result['pull_s']:g}`, `off` 0. Tokens are those of a chat, float32, medians of {many(result['rounds'], 'round')}. "
        f"Answers that are equal, token for token, with and without: {equal}.",
        measured(result, "python -m bench chats"),
        table(["fleet", "pulls", "", *turns, "last turn to first"], rows),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:g}"


# By the name of the result's file, in the order of the page.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {
    "prefixes": prefixes,
    "prefix-faults": faults,
    "chats": chats,
}
