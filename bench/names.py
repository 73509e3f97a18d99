"""The benches by name."""

from __future__ import annotations

# In the order in which `make bench` runs them, which takes some 20 minutes.
NAMES = [
    "scheduler",
    "handoff",
    "wire",
    "path",
    "router",
    "disaggregation",
    "fair-share",
    "speculation",
    "startup",
]
# Longer benches, and benches that need a GPU, Chromium or packages of their own.
ALONE = [
    *("classes", "clients", "early", "faults", "first-drafts", "flood", "gpu", "gpu-serve", "kernels"),
    *(
        "overload",
        "peers",
        "prefixes",
        "pulls",
        "routing",
        "simulate",
        "speculation-table",
        "unequal",
        "window",
    ),
]
