"""Prefill: the order in which prompts share an engine's steps."""
