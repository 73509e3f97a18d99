"""Records, the unit in which KV travels: one block of all layers, as bytes, with a digest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Records:
    """Consecutive records, from block `first_block` on.

    data: [n, record_bytes] uint8, valid until the next records are requested. digests: [n], computed
    where the records were packed; pass them on unchanged.
    """

    first_block: int
    data: Bytes
    digests: Digests
