"""The workers that hold the KV blocks of a prompt's prefix, by the events of their engines.

ledger   applies the operations of workers' logs in order, notices gaps, and who is silent
index    blocks -> workers, and how much of a prompt each of them holds
match    a prompt's way through the index, as the policy asks for it

The names of blocks are in `baton.prefix_keys`, the worker's side of the log in `baton.block_log`.
"""
