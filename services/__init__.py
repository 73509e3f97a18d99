"""The processes: router, workers, and the command that starts them."""
