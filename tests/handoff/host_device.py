"""A device whose memory is the host's and whose work is done at once."""

from contextlib import nullcontext

import numpy as np
import torch

from baton.handoff.groups import Part
from baton.handoff.memory import streams
from baton.handoff.memory.device import DeviceBlockCache, _arrived


class HostQueue(streams.Queue):
    def __init__(self):
        super().__init__(None)

    def use(self):
        return nullcontext()

    def after(self, mark):
        pass

    def mark(self):
        return self

    def synchronize(self):
        pass


class HostDevice(streams.Device):
    def __init__(self):
        super().__init__(torch.device("cpu"))

    def queue(self):
        return HostQueue()

    def current(self):
        return HostQueue()

    def pinned(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def _registered(self, *_):
        return 0


class Plain:
    """Records in an array, in place of a save's view."""

    def __init__(self, data):
        self.data = data

    def pieces(self, first, stop, _most):
        return [(first, stop)]

    def records(self, first, stop):
        return self.data[first:stop]


def gathered(cache, group, block_ids, records):
    """Gather blocks into `records`, as a host's cache does; return their digests."""
    if not isinstance(cache, DeviceBlockCache):
        return cache.gather(group, block_ids, records)
    coming = cache._send_down([Part(group, 0, tuple(block_ids))], Plain(records))
    return np.concatenate([_arrived(one) for one in coming] or [np.empty(0, np.uint64)])
