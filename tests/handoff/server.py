"""The two ends of a pull over gRPC, made to lie: a source that sends what it likes, a caller that asks it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from baton.handoff.wire import ERROR_KEY, PULL, RELEASE, SERVICE, TAKEN
from baton.protos import handoff_pb2 as pb
from baton.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from tests.handoff import caches

BLOCKS = 6


class FalseSource:
    """A Handoff service that answers each pull with `messages`, whatever was asked."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
        handlers = {
            PULL: grpc.unary_stream_rpc_method_handler(self._pull),
            RELEASE: grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(5)

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del request, context
        yield from list(self.messages)


def garble_service(number: int, seed: int) -> Iterator[tuple[str, str]]:
    """Send nonsense to a real service; yields its kind and the name of its error, empty if it was served.

    Raises AssertionError when what is saved there is not whole afterwards.
    """
    rng = random.Random(seed)
    source = caches.source(caches.make_cache(9, 1))
    source.save("victim", BLOCKS * caches.BLOCK_SIZE, range(1, 7), epoch=3)
    with grpc.insecure_channel(source.service.address, options=CHANNEL_OPTIONS) as channel:
        try:
            ticket = source.staging.tickets.of("victim", 3)
            for _ in range(number):
                kind, method, message, timeout = rng.choice(_CALLS)(rng, ticket)
                yield kind, _call(channel, method, message, timeout)
            assert source.staging.held()[0] == 1, "nonsense released what was saved"
            wanted = _right_pull(ticket)
            assert _call(channel, PULL, wanted.SerializeToString(), 5) == "", "a right pull is refused"
        finally:
            source.close()


def _right_pull(ticket: bytes) -> pb.PullRequest:
    return pb.PullRequest(request_id="victim", epoch=3, num_blocks=BLOCKS, ticket=ticket)


def _call(channel: grpc.Channel, method: str, message: bytes, timeout: float | None) -> str:
    path = f"/{SERVICE}/{method}"
    try:
        if method == PULL:
            pulling: Any = channel.unary_stream(path)(message, timeout=timeout)
            for _ in pulling:
                pass
            return ""
        answer: bytes = channel.unary_unary(path)(message, timeout=timeout)
    except grpc.RpcError as error:
        call: Any = error
        names = [value for key, value in call.trailing_metadata() or () if key == ERROR_KEY]
        return str(names[0]) if names else f"gRPC's {call.code().name}"
    return "not held" if method == RELEASE and not pb.ReleaseReply.FromString(answer).held else ""


def _garbage(rng: random.Random, ticket: bytes) -> tuple[str, str, bytes, float | None]:
    del ticket
    message = b"\x0a\xff" + rng.randbytes(rng.choice((0, 5, 4096)))  # a string that is longer than all of it
    return "service: garbage", rng.choice((PULL, RELEASE, TAKEN)), message, 5.0


def _wrong_pull(rng: random.Random, ticket: bytes) -> tuple[str, str, bytes, float | None]:
    request = _right_pull(ticket)
    huge = rng.choice((2**31, 2**32 - 1))
    key, value = rng.choice(
        (
            ("request_id", rng.choice(("", "other", "victim\x00", "v" * 100_000))),
            ("epoch", rng.choice((0, 2, 4, 2**64 - 1))),
            ("rank", rng.choice((1, huge))),
            ("first_block", rng.choice((1, 6, 7, huge))),
            ("num_blocks", rng.choice((0, 7, huge))),
            ("ticket", rng.choice((b"", ticket[:-1], ticket + b"\0", rng.randbytes(16)))),
        )
    )
    setattr(request, key, value)
    return "service: wrong pull", PULL, request.SerializeToString(), 5.0


def _wrong_release(rng: random.Random, ticket: bytes) -> tuple[str, str, bytes, float | None]:
    others = ("victim", 2), ("victim", 0), ("victim", 2**64 - 1), ("", 3), ("other", 3)
    request = pb.ReleaseRequest(confirmed=True)
    if rng.random() < 0.5:
        (request.request_id, request.epoch), request.ticket = rng.choice(others), ticket
    else:
        request.request_id, request.epoch, request.ticket = "victim", 3, rng.choice((b"", rng.randbytes(16)))
    return "service: another's release", RELEASE, request.SerializeToString(), 5.0


def _wrong_taken(rng: random.Random, ticket: bytes) -> tuple[str, str, bytes, float | None]:
    """Expect refusals: a save without a window is taken whole, and nobody takes anything without a ticket."""
    request = pb.TakenRequest(request_id="victim", epoch=3, ticket=ticket)
    if rng.random() < 0.5:
        request.ticket = rng.choice((b"", ticket[:-1], rng.randbytes(16)))
    request.taken = rng.choice((0, 1, 6, 7, 2**31, 2**32 - 1))
    request.wanted = rng.choice((0, 1, 6, 2**32 - 1))
    return "service: wrong word of what was taken", TAKEN, request.SerializeToString(), 5.0


def _no_deadline(rng: random.Random, ticket: bytes) -> tuple[str, str, bytes, float | None]:
    request = _right_pull(ticket)
    return "service: no deadline", PULL, request.SerializeToString(), rng.choice((None, 1e5))


_CALLS: list[Callable[[random.Random, bytes], tuple[str, str, bytes, float | None]]] = [
    _garbage,
    _wrong_pull,
    _wrong_pull,
    _wrong_release,
    _wrong_taken,
    _no_deadline,
]
