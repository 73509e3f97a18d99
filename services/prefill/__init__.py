"""What only a prefill worker does."""
