"""Name a prompt's KV blocks as the workers' engines name them: by vLLM's own hashes.

Each hash is computed from the one before. A growing chat would pay for its whole prompt on each turn (`python
-m bench prefixes` measures it), so the last `PIECES` pieces of prompts are cached with their hashes. A piece
is found by a quick hash over it and everything before it. The hashes also cover cache salt, adapter (by its
files' fingerprint) and the names and places of images.

Leans on: vllm.utils.hashing.get_hash_fn_by_name, vllm.v1.core.kv_cache_utils.{hash_block_tokens,
generate_block_hash_extra_keys}, vllm.v1.engine.EngineCoreRequest (prompt_token_ids, and what the extra keys
of blocks are made of: lora_request, cache_salt, mm_features).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any, NamedTuple

import xxhash
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from baton.prefix_keys import PromptKeys, prompt_keys
from baton.protos import scheduler_pb2

PIECE_BLOCKS = 64
PIECES = 8_192  # 8 MB, for half a million blocks

_TOKEN_BYTES = array("I").itemsize


class _Piece(NamedTuple):
    hashes: array[int]  # lowest 64 bits of each hash
    last: bytes  # the last hash in full


class PromptHasher:
    """Names the blocks of prompts as a worker that reports `hashing` does. For one event loop."""

    def __init__(self, hashing: scheduler_pb2.BlockHashing) -> None:
        self._function = get_hash_fn_by_name(hashing.algorithm)
        self._root = hashing.root
        self._block = hashing.tokens
        self._every = max(1, hashing.every)
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()

    def keys(self, request: Any) -> PromptKeys:
        hashes = self.hashes(request)
        every = self._every
        return prompt_keys(hashes if every == 1 else hashes[every - 1 :: every], self._block * every)

    def hashes(self, request: Any) -> array[int]:
        """Return the lowest 64 bits of each full block's hash, in order."""
        tokens = request.prompt_token_ids
        data = memoryview(array("I", tokens)).cast("B")
        blocks = len(tokens) // self._block
        extras = self._extras(request, blocks)
        name = xxhash.xxh3_128_digest(repr(extras[:1]).encode())
        parent, found = self._root, array("Q")
        for begin in range(0, blocks, PIECE_BLOCKS):
            end = min(begin + PIECE_BLOCKS, blocks)
            first, last = begin * self._block, end * self._block
            own = extras[begin:end]
            images = repr(own).encode() if request.mm_features else b""
            name = xxhash.xxh3_128_digest(name + images + data[first * _TOKEN_BYTES : last * _TOKEN_BYTES])
            piece = self._pieces.get(name)
            if piece is None:
                piece = self._hash(tokens[first:last], parent, own)
                if end - begin == PIECE_BLOCKS:
                    self._keep(name, piece)
            else:
                self._pieces.move_to_end(name)
            found += piece.hashes
            parent = piece.last
        return found

    def _extras(self, request: Any, blocks: int) -> list[Any]:
        size, image = self._block, 0
        if not request.mm_features:
            firsts = (generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in (0, size))
            first, later = firsts
            return [first] + [later] * (blocks - 1) if blocks else []
        extras = []
        for begin in range(0, blocks * size, size):
            extra, image = generate_block_hash_extra_keys(request, begin, begin + size, image)
            extras.append(extra)
        return extras

    def _hash(self, tokens: list[int], parent: bytes, extras: list[Any]) -> _Piece:
        function, size = self._function, self._block
        hashes = array("Q")
        for begin, extra in zip(range(0, len(tokens), size), extras, strict=True):
            parent = hash_block_tokens(function, parent, tokens[begin : begin + size], extra)
            hashes.append(int.from_bytes(parent[-8:], "big"))
        return _Piece(hashes, parent)

    def _keep(self, name: bytes, piece: _Piece) -> None:
        self._pieces[name] = piece
        if len(self._pieces) > PIECES:
            self._pieces.popitem(last=False)
