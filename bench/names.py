"""The benches by name."""

# `make bench` runs these in this order, in about 20 minutes.
NAMES = ["scheduler", "handoff", "path", "router", "disaggregation", "fair-share", "speculation"]
NAMES += ["startup"]
# Long benches, and benches that need a GPU, Prometheus or extra packages.
ALONE = ["classes", "clients", "faults", "gangs", "gpu", "gpu-serve", "images", "images-beside"]
ALONE += ["kernels", "overload", "peers", "prefixes", "shapes", "simulate", "speculation-table"]
