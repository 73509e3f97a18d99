"""The view of a deployment that `baton status`, `baton top` and the live page share."""
