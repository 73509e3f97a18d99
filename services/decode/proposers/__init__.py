"""The speculative methods, found by name (registry.py). See docs/extending.md."""
