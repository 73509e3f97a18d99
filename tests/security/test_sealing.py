"""Encrypted pieces can be decrypted only with the same key, once and in order."""

import pytest

from baton.security.errors import NotAsSealed
from baton.security.sealing import KEY_BYTES, TAG_BYTES, Seal, new_key

PIECES = [b"first", b"", b"third" * 1000]


def sealed(key, beside=b""):
    seal, made = Seal(key), []
    for piece in PIECES:
        out = bytearray(len(piece) + TAG_BYTES)
        seal.seal(piece, memoryview(out), beside)
        made.append(bytes(out))
    return made


def opened(key, pieces, beside=b""):
    seal, made = Seal(key), []
    for piece in pieces:
        out = bytearray(len(piece) - TAG_BYTES)
        seal.open(piece, memoryview(out), beside)
        made.append(bytes(out))
    return made


def test_round_trip():
    key = new_key()
    whole = sealed(key, b"prefix")
    assert opened(key, whole, b"prefix") == PIECES
    assert not any(b"first" in piece or b"third" in piece for piece in whole)


def test_equal_pieces_differ_when_sealed():
    seal, out = Seal(new_key()), [bytearray(5 + TAG_BYTES) for _ in range(2)]
    for one in out:
        seal.seal(b"first", memoryview(one))
    assert out[0] != out[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pieces: pieces[1:],
        lambda pieces: [pieces[0], pieces[0], *pieces[1:]],
        lambda pieces: [pieces[2], pieces[1], pieces[0]],
        lambda pieces: [bytes([pieces[0][0] ^ 1]) + pieces[0][1:], *pieces[1:]],
        lambda pieces: [pieces[0][:-1] + bytes([pieces[0][-1] ^ 1]), *pieces[1:]],
    ],
    ids=["left out", "doubled", "swapped", "changed", "another tag"],
)
def test_modified_pieces_are_refused(spoil):
    key = new_key()
    with pytest.raises(NotAsSealed):
        opened(key, spoil(sealed(key)))


def test_another_key_or_prefix_is_refused():
    key = new_key()
    with pytest.raises(NotAsSealed):
        opened(new_key(), sealed(key))
    with pytest.raises(NotAsSealed):
        opened(key, sealed(key, b"RECS"), b"FAIL")
    with pytest.raises(ValueError, match=f"not {KEY_BYTES}"):
        Seal(key[:-1])
