"""Placement: which worker prefills a request, and which one decodes it."""
