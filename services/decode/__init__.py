"""Decode, on every worker: speculative methods, the draft length, and the watch on acceptance."""
