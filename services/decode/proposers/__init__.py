"""Who drafts: one file a method, found by its name (registry.py). See docs/adding-a-method.md."""
