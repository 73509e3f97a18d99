"""The workers that hold the KV blocks of a prompt's prefix, by the events of their engines.

keys     the name of a block, the same for all who speak of it: its hash in vLLM, and how deep it lies
log      worker's side: what its cache gained and lost, as numbered operations
ledger   scheduler's side: applies them in order, notices gaps, and who is silent
index    blocks -> workers, and how much of a prompt each of them holds
match    a prompt's way through the index, as the policy asks for it
"""
