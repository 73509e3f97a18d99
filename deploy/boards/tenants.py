"""Tenants and classes: who asks how much, who is refused, who waits, whose goals are met."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, rate, stacked

_T = "baton_router_tenant"
_GOALS = "baton_router_class_goals_total"
_MET = rate(f'{_GOALS}{{met="yes"}}', "class, goal")

BOARD = Board(
    "baton-tenants",
    "Baton: tenants",
    "Requests and tokens of each tenant, their limits, their waits.",
    (
        Row(
            "Use",
            (
                stacked(
                    "Requests admitted", (rate(f"{_T}_requests_total", "tenant"), "{{tenant}}"), unit="reqps"
                ),
                stacked(
                    "Tokens",
                    (rate(f"{_T}_tokens_total", "tenant, kind"), "{{tenant}} {{kind}}"),
                    unit="suffix: tok/s",
                ),
                lines("Requests that wait", (f"sum by (tenant) ({_T}_waiting_requests)", "{{tenant}}")),
            ),
        ),
        Row(
            "Limits",
            (
                lines(
                    "Refused, by limit",
                    (rate(f"{_T}_refusals_total", "tenant, limit"), "{{tenant}} {{limit}}"),
                    unit="reqps",
                    width=12,
                ),
                lines(
                    "Clients refused at the door",
                    (rate("baton_router_clients_refused_total", "reason"), "{{reason}}"),
                    unit="reqps",
                    width=12,
                ),
            ),
        ),
        Row(
            "Classes",
            (
                lines(
                    "Goals met",
                    (f"{_MET} / {rate(_GOALS, 'class, goal')}", "{{class}} {{goal}}"),
                    unit="percentunit",
                ),
                lines(
                    "Requests that wait",
                    ("sum by (class) (baton_router_class_waiting_requests)", "{{class}}"),
                ),
                lines(
                    "Given way on the workers",
                    (rate("baton_worker_requests_held_back_total"), "left out of a step"),
                    (rate("baton_worker_requests_preempted_for_classes_total"), "preempted"),
                ),
            ),
        ),
    ),
)
