"""Workers: each of them, side by side."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, quantile, rate

_W = "baton_worker"
_EACH = "{{role}} {{instance}}"
_BY = "role, instance"

BOARD = Board(
    "baton-workers",
    "Baton: workers",
    "Each worker: batch, queue, KV cache, prefix cache, preemptions, refusals, roles.",
    (
        Row(
            "Load",
            (
                lines("In the batch", (f"sum by ({_BY}) ({_W}_requests_running)", _EACH)),
                lines("In the engine's queue", (f"sum by ({_BY}) ({_W}_requests_waiting)", _EACH)),
                lines(
                    "KV cache in use",
                    (f"max by ({_BY}) ({_W}_kv_cache_usage_ratio)", _EACH),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Work",
            (
                lines(
                    "Output tokens", (rate(f"{_W}_generated_tokens_total", _BY), _EACH), unit="suffix: tok/s"
                ),
                lines(
                    "Engine step, p99",
                    (quantile(0.99, f"{_W}_engine_step_seconds", _BY), _EACH),
                    unit="s",
                ),
                lines(
                    "Prefix cache, share found",
                    (
                        f"{rate(f'{_W}_prefix_cache_hits_total', _BY)} / "
                        f"{rate(f'{_W}_prefix_cache_queries_total', _BY)}",
                        _EACH,
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Trouble",
            (
                lines(
                    "Requests not taken",
                    (rate(f"{_W}_requests_refused_total", "instance, why"), "{{instance}} {{why}}"),
                    unit="reqps",
                ),
                lines(
                    "Preemptions",
                    (rate("vllm:num_preemptions_total"), "all workers"),
                    unit="ops",
                    about="As requests report them to the routers.",
                ),
                lines(
                    "Lost, and changes of role",
                    ("max by (role) (baton_scheduler_workers_lost_total)", "lost {{role}}"),
                    ("max by (by) (baton_scheduler_role_changes_total)", "changed by {{by}}"),
                ),
            ),
        ),
        Row(
            "Processes",
            (
                lines(
                    "CPU", ("rate(process_cpu_seconds_total[$__rate_interval])", _EACH), unit="percentunit"
                ),
                lines("Memory", ("process_resident_memory_bytes", _EACH), unit="bytes"),
                lines(
                    "Clock against the scheduler's",
                    (f"{_W}_clock_offset_seconds", _EACH),
                    unit="s",
                ),
            ),
        ),
    ),
)
