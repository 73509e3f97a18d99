"""Placement: which worker reads a prompt and which one writes the answer."""
