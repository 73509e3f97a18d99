"""Placement: the choice of a prefill worker and a decode worker for each request."""
