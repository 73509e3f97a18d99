"""The section of docs/benchmarks.md about classes of requests."""

from __future__ import annotations

from collections.abc import Callable

from baton.services.router.timeline import TO_FIRST_TOKEN
from bench.report_sections import Block, Result, many, measured, table


def classes(result: Result) -> list[Block]:
    load = result["load"]
    keys = ["ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "answers"]
    rows = [
        [
            shape,
            arm,
            *(one["interactive"].get(arm, {}).get(key, "") for key in keys),
            one["batch_tokens_per_s"].get(arm, ""),
        ]
        for shape, one in result["deployments"].items()
        for arm in dict.fromkeys([*one["interactive"], *one["batch_tokens_per_s"]])
    ]
    goals = [[shape, one["left"], *one["goals"].values()] for shape, one in result["deployments"].items()]
    names = list(next(iter(result["deployments"].values()))["goals"])
    return [
        "## Interactive requests beside a flood of batch work\n",
        f"The 80 M model. Interactive requests come at random times, {load['per_s']:g} a second for each pair of workers, the "
        f"same times in each arm of a round; batch work is {load['streams']} streams for each pair, more than there are slots. In "
        "turns each is alone, both come with classes (`service_tier: flex`), and both come without; in one more arm the "
        "interactive ones come while a loop keeps the decode workers' cores busy, as batch work does: a floor for the time to "
        f"first token. {many(load['rounds'], 'round')} of {load['seconds']:g} s each. The interactive class has goals of "
        f"{load['ttft_ms']:g} ms for the first token and {load['itl_ms']:g} ms between tokens.",
        measured(result, "python -m bench classes"),
        table(
            [
                "",
                "",
                *(key.removesuffix("_ms").replace("_", " ") + " ms" for key in keys[:-1]),
                "answers",
                "batch tokens/s",
            ],
            rows,
        ),
        "Against `alone`, and batch against what is left: the part of the time in which the busiest engine has no step while "
        "interactive requests are alone, of the tokens a second of `batch alone`.\n",
        table(["", "left", *names], goals),
        "The stages of the time to first token ([observability](observability.md#the-time-to-first-token-by-stage)), the means of the middle "
        "fifth of the requests, ms:\n",
        stages(result),
    ]


def stages(result: Result) -> Block:
    told = [
        [shape, arm, one["stages_p50_ms"]]
        for shape, found in result["deployments"].items()
        for arm, one in found["interactive"].items()
    ]
    names = [name for name in TO_FIRST_TOKEN if any(name in means for *_, means in told)]
    return table(
        ["", "", *names],
        [[shape, arm, *(means.get(name, "") for name in names)] for shape, arm, means in told],
    )


SECTIONS: dict[str, Callable[[Result], list[Block]]] = {"classes": classes}
