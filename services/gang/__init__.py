"""Gangs: engines in several workers that compute one model together, and live and die together."""
