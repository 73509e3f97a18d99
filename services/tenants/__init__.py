"""Tenants: who may use a deployment, and how much of it.

    model.py       keys, tenants and their limits: the book of both, as files and Redis hold it
    file_book.py   the book in a YAML file       redis_book.py   the book in Redis
    keyring.py     the book in a router's memory: finds the caller of a key, follows changes
    shared.py      the Redis that routers share; while it is away, each goes on alone
    rates.py       requests a second, tokens a minute      slots.py   requests at a time
    quotas.py      all limits of a caller together: enter, charge, settle, leave

Checking a key costs one SHA-256 and one look-up in a dict. A limit costs a look-up in this process's memory
and, if routers share limits, one call of Redis, unless this router's own count refuses already.
"""
