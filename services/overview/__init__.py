"""The view of a deployment that `baton top` and the live page share; `baton status` has its own columns."""
