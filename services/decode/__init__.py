"""What only a decode worker does."""
