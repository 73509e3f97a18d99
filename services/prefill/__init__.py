"""Prefill: order and shares of prompts in an engine's steps, on every worker."""
