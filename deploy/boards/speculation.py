"""Speculation: what is drafted, what is accepted, whether it pays."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, rate

_W = "baton_worker"
_AT = "method, source, position"

BOARD = Board(
    "baton-speculation",
    "Baton: speculation",
    "Acceptance by method and position, the length of drafts, tokens a step, the alarm.",
    (
        Row(
            "Acceptance",
            (
                lines(
                    "Alarm",
                    (f"max by (instance, method) ({_W}_acceptance_alarm)", "{{instance}} {{method}}"),
                    about="1: drafts are accepted too seldom, more than by chance.",
                ),
                lines(
                    "First position",
                    (f"{_W}_first_position_acceptance_ratio", "{{instance}} {{method}}"),
                    (f"{_W}_acceptance_reference_ratio", "{{instance}} reference"),
                    unit="percentunit",
                ),
                lines(
                    "By position",
                    (
                        f"{rate(f'{_W}_accepted_tokens_by_position_total', _AT)} / "
                        f"{rate(f'{_W}_drafted_tokens_by_position_total', _AT)}",
                        "{{method}} {{source}} {{position}}",
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Gain",
            (
                lines(
                    "Mean accepted length",
                    (
                        f"1 + {rate(f'{_W}_accepted_tokens_total', 'instance, method')} / "
                        f"{rate(f'{_W}_drafts_total', 'instance, method')}",
                        "{{instance}} {{method}}",
                    ),
                    about="Tokens that a request gains in a step with a draft.",
                ),
                lines(
                    "Tokens a step",
                    (
                        f"{rate(f'{_W}_generated_tokens_total', 'instance')} / "
                        f"{rate(f'{_W}_engine_step_seconds_count', 'instance')}",
                        "{{instance}}",
                    ),
                    about="Of all requests in the batch together.",
                ),
                lines(
                    "Length of the next draft",
                    (f"{_W}_draft_length", "{{instance}} {{method}}"),
                    about="It varies with num_speculative_tokens: auto.",
                ),
            ),
        ),
        Row(
            "Cost",
            (
                lines(
                    "Drafted in vain",
                    (
                        f"{rate(f'{_W}_drafted_tokens_total', 'method')} - "
                        f"{rate(f'{_W}_accepted_tokens_total', 'method')}",
                        "{{method}}",
                    ),
                    unit="suffix: tok/s",
                    width=12,
                ),
                lines(
                    "Share of the steps' time that drafting takes",
                    (
                        f'sum by (instance) (rate({_W}_engine_step_phase_seconds_sum{{phase="draft"}}'
                        "[$__rate_interval])) / "
                        f"{rate(f'{_W}_engine_step_phase_seconds_sum', 'instance')}",
                        "{{instance}}",
                    ),
                    unit="percentunit",
                    width=12,
                ),
            ),
        ),
    ),
)
