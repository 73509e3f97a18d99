"""Tenants: API keys and limits.

    model.py       keys, tenants and their limits; the book that holds them
    file_book.py   the book in a YAML file       redis_book.py   the book in Redis
    keyring.py     the book in a router's memory: finds the caller of a key, follows changes
    shared.py      the Redis that routers share; without it each router counts alone
    rates.py       requests per second, tokens per minute      slots.py   concurrent requests
    quotas.py      all limits of a caller: enter, charge, settle, leave

Checking a key takes one SHA-256 and one dict lookup. Checking a limit takes a lookup in this process and, if
routers share limits, one Redis call, unless this router's own count already refuses.
"""
