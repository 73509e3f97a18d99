"""Handoff: what moves between the workers, how long it takes, what goes wrong."""

from __future__ import annotations

from deploy.boards.model import Board, Row, lines, mean, quantiles, rate, stacked

_W, _R = "baton_worker", "baton_router"

BOARD = Board(
    "baton-handoff",
    "Baton: handoff",
    "Bytes, stages, failures by name, what is pinned and what was recomputed.",
    (
        Row(
            "What moves",
            (
                lines(
                    "Bytes",
                    (rate(f"{_R}_handoff_bytes_total", "transport"), "{{transport}}"),
                    (rate(f"{_R}_handoff_early_bytes_total", "transport"), "{{transport}}, early"),
                    unit="Bps",
                    about="early: while the prompt was still prefilled, so that nobody waits for them.",
                ),
                lines(
                    "Handoffs",
                    (rate(f"{_W}_handoffs_saved_total"), "saved"),
                    (rate(f"{_W}_handoffs_loaded_total", "transport"), "loaded by {{transport}}"),
                    unit="ops",
                ),
                lines(
                    "Placements",
                    (rate(f"{_R}_placements_total", "kind"), "{{kind}}"),
                    unit="ops",
                    about="pair: a handoff follows. alone: one worker prefills and decodes.",
                ),
            ),
        ),
        Row(
            "How long it takes",
            (
                lines(
                    "From the first token until the KV is loaded",
                    *quantiles(f"{_R}_handoff_seconds", "transport"),
                    unit="s",
                ),
                stacked(
                    "Stages, mean",
                    (mean(f"{_R}_handoff_stage_seconds", "stage"), "{{stage}}"),
                    unit="s",
                    about="save and sample, the rest of that step, on the prefill worker, the others on the "
                    "decode worker; total lasts from the save's end until the KV is loaded.",
                ),
                lines(
                    "Workers' own figures, p50 and p99",
                    *((expr, f"save {name}") for expr, name in quantiles(f"{_W}_handoff_save_seconds")),
                    *((expr, f"move {name}") for expr, name in quantiles(f"{_W}_handoff_move_seconds")),
                    unit="s",
                ),
            ),
        ),
        Row(
            "What goes wrong",
            (
                lines(
                    "Not loaded, by error",
                    (rate(f"{_W}_handoffs_load_failed_total", "error"), "{{error}}"),
                    unit="ops",
                ),
                lines(
                    "Not saved; recomputed; avoided",
                    (rate(f"{_W}_handoffs_save_failed_total"), "not saved"),
                    (rate(f"{_R}_recomputed_prompts_total"), "recomputed"),
                    (rate(f"{_R}_pairs_avoided_total"), "pairs avoided"),
                    unit="ops",
                ),
                lines(
                    "Age of the oldest save beyond its lease",
                    (f"max by (instance) ({_W}_handoffs_pinned_overdue_seconds)", "{{instance}}"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Beginnings of prompts, from workers that hold them",
            (
                lines(
                    "Asked for, by outcome",
                    (rate(f"{_R}_prefix_pulls_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                    about="loaded, or why the prefill worker computed the beginning itself.",
                    width=12,
                ),
                lines(
                    "Tokens that were not computed again",
                    (rate(f"{_R}_prefix_pulled_tokens_total"), "tokens"),
                    width=12,
                ),
            ),
        ),
        Row(
            "What waits to be pulled",
            (
                lines("Handoffs", (f"sum by (instance) ({_W}_handoffs_pinned)", "{{instance}}"), width=12),
                lines(
                    "Bytes",
                    (f"sum by (instance) ({_W}_handoffs_pinned_bytes)", "{{instance}}"),
                    unit="bytes",
                    width=12,
                ),
            ),
        ),
    ),
)
