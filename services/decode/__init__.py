"""Decode: speculative methods, the draft length, the watch on acceptance."""
