"""Reliability: leases, epochs, retries, failovers, the store, certificates."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, number, rate

_S, _R = "baton_scheduler", "baton_router"

BOARD = Board(
    "baton-reliability",
    "Baton: reliability",
    "What died, what was tried again, and who stands in for whom.",
    (
        Row(
            "Now",
            (
                number("Processes that answer", "sum(up)"),
                number("Processes that do not", "count(up == 0) or vector(0)", bad_above=1),
                number("A scheduler answers the routers", f"min({_R}_scheduler_up)", bad_below=1),
                number("The store answers", f"min({_S}_store_up)", bad_below=1),
                number(
                    "Requests with more than one attempt",
                    f'1 - sum(rate({_R}_request_attempts_bucket{{le="1.0"}}[5m])) / '
                    f"sum(rate({_R}_request_attempts_count[5m]))",
                    "percentunit",
                    bad_above=0.01,
                ),
                number(
                    "Error budget burnt, 1 h",
                    "baton:request_errors:ratio_rate1h / 0.001",
                    about="1: as fast as 99.9 % allow.",
                    bad_above=1,
                ),
            ),
        ),
        Row(
            "Attempts",
            (
                lines(
                    "Attempts that failed, by trouble",
                    (rate(f"{_R}_retries_total", "trouble"), "{{trouble}}"),
                    unit="ops",
                ),
                lines(
                    "Attempts that failed, by worker",
                    (rate(f"{_R}_retries_total", "worker"), "{{worker}}"),
                    unit="ops",
                ),
                lines(
                    "Attempts under way",
                    (f"max({_S}_live_attempts)", "scheduler"),
                    (f"sum({_R}_live_requests)", "requests at the routers"),
                ),
            ),
        ),
        Row(
            "Fencing",
            (
                lines(
                    "Leases that ran out",
                    (f"max(rate({_S}_leases_expired_total[$__rate_interval]))", "attempts"),
                    unit="ops",
                    about="Each scheduler counts all of them.",
                ),
                lines(
                    "Late messages refused",
                    (rate(f"{_S}_stale_epochs_total", "what"), "{{what}}"),
                    unit="ops",
                ),
                lines(
                    "Booked by routers' reports",
                    (rate(f"{_S}_adopted_total"), "attempts"),
                    unit="ops",
                    about="Placed by another scheduler or by none, or lost here.",
                ),
            ),
        ),
        Row(
            "Failovers",
            (
                lines(
                    "Workers lost",
                    (f"max by (role) (increase({_S}_workers_lost_total[$__rate_interval]))", "{{role}}"),
                ),
                lines(
                    "Scheduler and store lost",
                    (f"sum(increase({_R}_scheduler_losses_total[$__rate_interval]))", "scheduler"),
                    (f"sum(increase({_S}_store_losses_total[$__rate_interval]))", "store"),
                ),
                lines(
                    "Placed by routers alone",
                    (rate(f"{_R}_placements_without_scheduler_total"), "placements"),
                    unit="ops",
                ),
                lines(
                    "Placed by another of several schedulers",
                    (rate(f"{_R}_placements_moved_total"), "placements"),
                    unit="ops",
                    about="The one that the router belongs to did not answer.",
                ),
            ),
        ),
        Row(
            "Stores and certificates",
            (
                lines("Store answers", (f"{_S}_store_up", "{{instance}}")),
                lines(
                    "Requests kept for a resumption", (f"{_R}_journal_bytes", "{{instance}}"), unit="bytes"
                ),
                lines(
                    "Certificates: share of the life left",
                    ("baton_certificate_left_seconds / baton_certificate_life_seconds", "{{instance}}"),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
