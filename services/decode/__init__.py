"""Decode: speculative methods, draft length, the watch on acceptance; on every worker, as each can decode."""
