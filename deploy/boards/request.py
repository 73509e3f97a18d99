"""A request's way: where its time goes, stage by stage, prefill beside decode."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, mean, quantile, quantiles, rate, stacked

_TTFT, _ITL = "baton_router_ttft_stage_seconds", "baton_router_itl_stage_seconds"
_FIRST = "baton_router_time_to_first_token_seconds"

BOARD = Board(
    "baton-request",
    "Baton: a request's way",
    "Where the time to first token and the time between tokens go.",
    (
        Row(
            "Time to first token",
            (
                stacked(
                    "Mean, by stage",
                    (
                        f"{rate(f'{_TTFT}_sum', 'stage')} / on () group_left () {rate(f'{_FIRST}_count')}",
                        "{{stage}}",
                    ),
                    unit="s",
                    about="The stages add up to the mean time until the first byte of a stream is with its "
                    "client's socket: `deliver` comes after the first token.",
                    width=12,
                ),
                lines("p99 of each stage", (quantile(0.99, _TTFT, "stage"), "{{stage}}"), unit="s", width=12),
            ),
        ),
        Row(
            "Before the engine",
            (
                lines("Placement", *quantiles("baton_router_placement_seconds"), unit="s"),
                lines(
                    "Wait for room",
                    *quantiles("baton_router_wait_seconds"),
                    unit="s",
                    about="Of requests that were not placed at once.",
                ),
                lines(
                    "Queue at the prefill worker",
                    *quantiles("baton_router_queue_seconds"),
                    unit="s",
                    about="From the placement to the prompt's first step.",
                ),
            ),
        ),
        Row(
            "Prefill beside decode",
            (
                lines(
                    "Engine step, p50 and p99",
                    *quantiles("baton_worker_engine_step_seconds", "role"),
                    unit="s",
                ),
                lines(
                    "Parts of a step, mean",
                    (
                        f"{rate('baton_worker_engine_step_phase_seconds_sum', 'role, phase')} / "
                        f"{rate('baton_worker_engine_step_phase_seconds_count', 'role, phase')}",
                        "{{role}} {{phase}}",
                    ),
                    unit="s",
                ),
                lines(
                    "Handoff, p50 and p99",
                    *quantiles("baton_router_handoff_seconds", "transport"),
                    unit="s",
                    about="From the first token until the KV cache is loaded on the decode worker.",
                ),
            ),
        ),
        Row(
            "Between two tokens",
            (
                stacked(
                    "Mean, by stage",
                    (mean(_ITL, "stage"), "{{stage}}"),
                    unit="s",
                    about="Of a sample: each stage has the mean of its own observations.",
                    width=12,
                ),
                lines("p99 of each stage", (quantile(0.99, _ITL, "stage"), "{{stage}}"), unit="s", width=12),
            ),
        ),
    ),
)
