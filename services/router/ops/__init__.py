"""The live page of a router: what is running now. static/ is the page itself; it needs no build step.

While nobody is watching, the page costs the router one sample per second (docs/operations.md).
"""
