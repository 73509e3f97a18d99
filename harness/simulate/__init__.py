"""Compare Baton's policy with others in the simulator, and the simulator with reality."""
