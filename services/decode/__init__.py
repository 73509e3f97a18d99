"""Speculative decoding, and sharing an engine's steps among classes."""
