"""The hashes of a prompt's prefixes."""

from __future__ import annotations

from baton.services.router.prefix import MAX_BLOCKS, prefix_hashes


def test_prefix_hashes() -> None:
    tokens = list(range(100))
    hashes = prefix_hashes(tokens, 16)
    assert len(hashes) == 6  # full blocks alone
    assert prefix_hashes([*tokens, 7, 8, 9], 16) == hashes
    other = prefix_hashes([*tokens[:50], 0, *tokens[51:]], 16)
    assert (other[:3], other[3:] == hashes[3:]) == (hashes[:3], False)
    assert prefix_hashes(tokens, 16, salt="x")[0] != hashes[0]
    assert len(prefix_hashes([1] * 100_000, 16)) == MAX_BLOCKS
    assert prefix_hashes([1] * 15, 16) == ()
