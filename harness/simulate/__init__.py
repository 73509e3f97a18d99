"""The simulator against others and against reality: baselines, measured curves, validation.

The simulator itself is part of the product (baton.services.simulate): `baton tune` runs on it.
"""
