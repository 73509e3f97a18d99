"""The benches by name."""

# `make bench` runs these in this order, in about 20 minutes.
NAMES = ["scheduler", "handoff", "wire", "path", "router", "disaggregation", "fair-share", "speculation"]
NAMES += ["startup"]
# Long benches, and benches that need a GPU, Chromium or extra packages.
ALONE = ["classes", "clients", "early", "faults", "first-drafts", "flood", "gangs", "gpu", "gpu-serve"]
ALONE += ["images", "images-beside", "kernels", "overload", "peers", "prefixes", "pulls", "routing", "shapes"]
ALONE += ["simulate", "speculation-table", "window"]
