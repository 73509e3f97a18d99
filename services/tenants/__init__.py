"""Tenants: API keys and limits.

Checking a key takes one SHA-256 and one dict lookup. Checking a limit takes a lookup in this process and, if
routers share limits, one Redis call, unless this router's own count already refuses.
"""
