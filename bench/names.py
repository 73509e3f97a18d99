"""The benchmarks by name: those that `make bench` runs, and those that are runs of their own."""

from __future__ import annotations

# In the order in which `make bench` runs them.
NAMES = [
    "scheduler",
    "autoscale",
    "handoff",
    "wire",
    "proposers",
    "path",
    "router",
    "disaggregation",
    "fair_share",
    "speculation",
    "startup",
]
# Not part of `all`: gpu, gpu-serve and kernels are for GPUs, `preload` needs libraries that are not installed
# here, and the others take long.
ALONE = [
    "attribution",
    "chats",
    "classes",
    "clients",
    "early",
    "faults",
    "first-drafts",
    "flood",
    "gpu",
    "gpu-serve",
    "hosts",
    "idle-streams",
    "kernels",
    "links",
    "live-page",
    "overload",
    "peers",
    "preload",
    "prefix-faults",
    "prefixes",
    "pulls",
    "ray-autoscale",
    "routing",
    "simulate",
    "soak",
    "tls",
    "watched",
    "window",
]
