"""Tenants: who asks how much, who is refused, who waits."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, rate, stacked

_T = "baton_router_tenant"

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
    ),
)
