"""The speculative methods: one file each, found by name (registry.py). See docs/adding-a-method.md."""
