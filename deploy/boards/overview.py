"""Overview: is all well, and if not, where."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, number, quantile, quantiles, rate, stacked

_FIRST = "baton_router_time_to_first_token_seconds"

BOARD = Board(
    "baton-overview",
    "Baton: overview",
    "Goals, traffic, latency and the saturation of each side. Begin here.",
    (
        Row(
            "Goals",
            (
                number(
                    "Alerts",
                    'count(ALERTS{alertname=~"Baton.*", alertstate="firing"}) or vector(0)',
                    about="Those that fire now; docs/runbooks has a page for each.",
                    bad_above=1,
                ),
                number(
                    "Requests served",
                    "1 - baton:request_errors:ratio_rate1h",
                    "percentunit",
                    "Share of the last hour's requests without an error; aborted ones do not count.",
                    bad_below=0.999,
                ),
                number(
                    "First tokens within 1 s",
                    f'sum(rate({_FIRST}_bucket{{le="1.0"}}[1h])) / sum(rate({_FIRST}_count[1h]))',
                    "percentunit",
                    "Of the last hour.",
                    bad_below=0.95,
                ),
                number("Time to first token, p99", quantile(0.99, _FIRST), "s", bad_above=1),
                number("Requests that wait", "sum(baton_router_waiting_requests)", bad_above=100),
                number(
                    "Workers ready",
                    'sum(max by (role) (baton_scheduler_workers{state="ready"}))',
                    bad_below=1,
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                stacked(
                    "Requests completed, by outcome",
                    (rate("baton_router_requests_total", "outcome"), "{{outcome}}"),
                    unit="reqps",
                ),
                lines(
                    "Tokens",
                    (rate("baton_worker_generated_tokens_total"), "output"),
                    (rate("vllm:prompt_tokens_total"), "prompt"),
                    unit="suffix: tok/s",
                ),
                lines(
                    "Refused or not placed",
                    (rate("baton_router_rejections_total", "code"), "not placed: {{code}}"),
                    (rate("baton_router_clients_refused_total", "reason"), "refused: {{reason}}"),
                    unit="reqps",
                ),
            ),
        ),
        Row(
            "Latency",
            (
                lines("Time to first token", *quantiles(_FIRST), unit="s", width=12),
                lines(
                    "Between two tokens",
                    *quantiles("vllm:inter_token_latency_seconds"),
                    unit="s",
                    about="As the client's stream sees it.",
                    width=12,
                ),
            ),
        ),
        Row(
            "Saturation of each side",
            (
                lines(
                    "Workers ready",
                    ('max by (role) (baton_scheduler_workers{state="ready"})', "{{role}}"),
                    width=6,
                ),
                lines(
                    "Requests in batches and in engines' queues",
                    ("sum by (role) (baton_worker_requests_running)", "{{role}} running"),
                    ("sum by (role) (baton_worker_requests_waiting)", "{{role}} waiting"),
                    width=6,
                ),
                lines(
                    "KV cache in use",
                    ("avg by (role) (baton_worker_kv_cache_usage_ratio)", "{{role}}"),
                    unit="percentunit",
                    width=6,
                ),
                lines(
                    "Queue of the routers",
                    ("sum(baton_router_waiting_requests)", "requests"),
                    ("max(baton_router_waiting_estimate_seconds)", "expected wait, s"),
                    width=6,
                ),
            ),
        ),
    ),
)
