"""Which workers hold the KV blocks of a prompt's prefix, as their engines report it.

`baton.prefix_keys` defines the keys of blocks, `baton.block_log` is the workers' side.
"""
