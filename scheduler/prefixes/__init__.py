"""Know which workers hold the KV blocks of a prompt's prefix, from the events of their engines.

  ledger   applies the operations of workers' logs in order; notices gaps and silent workers
  index    blocks -> workers, and how much of a prompt each of them holds
  match    looks up one prompt in the index for the policy

The names of blocks are in `baton.prefix_keys`, the worker's side of the log in `baton.block_log`.
"""
