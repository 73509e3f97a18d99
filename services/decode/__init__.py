"""Speculative decoding, and the share of decode steps between classes."""
