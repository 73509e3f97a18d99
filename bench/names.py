"""The benches by name."""

from __future__ import annotations

# `make bench` runs these in this order, in about 20 minutes.
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
# Long benches, and benches that need a GPU, Chromium or extra packages.
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
