"""Comparisons of the simulator (baton.services.simulate) with other policies and with reality."""
