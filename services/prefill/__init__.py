"""Order prompts and share an engine's steps among them, on every worker."""
