"""The speculative methods: one file each, found by name (registry.py). See docs/extending.md."""
