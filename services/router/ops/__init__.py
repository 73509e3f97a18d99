"""The live page of a router: what is running now. static/ is the page itself, without a build step.

While nobody watches, it costs the router one sample per second (docs/operations.md).
"""
