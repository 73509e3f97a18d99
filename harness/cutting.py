"""A proxy in front of a worker that fails an attempt at a chosen token.

A cutter forwards everything between the router and one worker. If a request's id says so, the cutter ends the
request's first attempt with `Failed`, as a worker's death would, after an exact number of output tokens, even
in the middle of a step. The client sets the id (X-Request-Id), so the router and the worker run unchanged.

    cut-7-NAME.   the decode worker fails when the answer has 7 tokens
    cut-0-NAME.   the prefill worker fails before the answer has any token
    cut-7r-NAME.  as cut-7, and prefill attempts fail afterwards, so a decode worker has to prefill
    cut-0p-NAME.  the prefill worker fails when it has computed the prompt, before its token
    cut-1p-NAME.  the prefill worker fails between its token and its manifest
    cut-0e-NAME.  the encode worker fails before it computes an image
    cut-1e-NAME.  it fails when it has computed the image
    cut-2e-NAME.  it fails when the router knows of the embeddings, but the prompt's worker does not
    cut-3e-NAME.  it fails before the embeddings are pulled
"""

from __future__ import annotations

import queue
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from baton.attempts import attempt_id, is_image
from baton.handoff import manifest
from baton.protos import worker_pb2 as pb
from baton.protos import worker_pb2_grpc as rpc
from baton.rpc import CALL_TIMEOUT_S, CHANNEL_OPTIONS, SERVER_OPTIONS

with warnings.catch_warnings():  # torch raises deprecation warnings on import
    warnings.simplefilter("ignore")
    from baton.services.engine import wire

_WISH = re.compile(r"cut-(\d+)([rpe]?)-[a-z0-9-]*(?=\.)")
_STREAMS = 64  # for routers, and for workers that follow an attempt
_NOBODY = "127.0.0.1:1"


@dataclass
class _Cut:
    """An attempt that will end early."""

    at: int  # when the answer has this many tokens
    request_id: str
    epoch: int
    generated: int  # tokens so far
    at_manifest: bool = False


class Cutter(rpc.WorkerServicer):
    """A worker's service; `cuts` counts its cuts by the client's name for them."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._pending: dict[str, _Cut] = {}  # attempt id -> cut
        self.cuts: Counter[str] = Counter()

    def stand_before(self, worker: str) -> None:
        """Forward calls to the worker at host:port. Call this before the first request."""
        self._channel = grpc.insecure_channel(worker, options=CHANNEL_OPTIONS)
        self._stub = rpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        del context
        reply: pb.HelloReply = self._stub.Hello(request, timeout=CALL_TIMEOUT_S)
        return reply

    def Follow(self, request: pb.FollowRequest, context: Any) -> Iterator[pb.FollowReply]:
        call = self._stub.Follow(request)
        context.add_callback(call.cancel)
        try:
            for reply in call:
                yield self._lost(request, reply, context)
        except grpc.RpcError as error:
            if not call.cancelled():
                context.abort(error.code(), error.details())

    def Run(self, requests: Any, context: Any) -> Iterator[pb.RunReply]:
        up: queue.SimpleQueue[pb.RunRequest | None] = queue.SimpleQueue()
        down: queue.SimpleQueue[pb.RunReply | None] = queue.SimpleQueue()
        call = self._stub.Run(iter(up.get, None))

        def hang_up() -> None:
            call.cancel()
            up.put(None)
            down.put(None)

        context.add_callback(hang_up)

        def read_requests() -> None:
            try:
                for request in requests:
                    refusal = self._refused(request.start) if request.HasField("start") else None
                    if refusal is None:
                        up.put(request)
                    else:
                        down.put(pb.RunReply(failed=[refusal]))
            except grpc.RpcError:
                pass  # the router is gone: hang_up ends the rest
            up.put(None)

        def read_replies() -> None:
            try:
                for reply in call:
                    down.put(self._shortened(reply, up))
            except grpc.RpcError:
                pass  # the worker is gone, or we cancelled
            down.put(None)

        for target in (read_requests, read_replies):
            threading.Thread(target=target, daemon=True).start()
        yield from iter(down.get, None)

    def _refused(self, start: pb.Start) -> pb.Failed | None:
        """Return the failure of an attempt that fails at once; remember one that fails later."""
        wish = _WISH.search(start.request_id)
        if wish is None:
            return None
        at, how, generated = int(wish[1]), wish[2], len(start.output_token_ids)
        if how == "e" or start.phase == pb.PHASE_ENCODE:
            return self._refused_encode(start, at) if how == "e" and is_image(start.request_id) else None
        prefilling, follows = start.phase == pb.PHASE_PREFILL, start.HasField("source")
        if start.epoch > 1:
            return self._failed(start.request_id, start.epoch) if prefilling and how == "r" else None
        if follows and not prefilling:
            if not at or how == "p":
                return None  # it follows a prefill, which fails instead
            generated += 1  # the prefill's token
        elif generated >= at and not (prefilling and (at or how == "p")):
            return self._failed(start.request_id, start.epoch)
        if not prefilling or how == "p":
            self._await(_Cut(at, start.request_id, start.epoch, generated, at_manifest=how == "p" and at > 0))
        return None

    def _refused_encode(self, start: pb.Start, at: int) -> pb.Failed | None:
        if start.epoch > 1:
            return None
        if at == 0:
            return self._failed(start.request_id, start.epoch)
        if at == 1:
            self._await(_Cut(at, start.request_id, start.epoch, 0, at_manifest=True))
        return None

    def _await(self, cut: _Cut) -> None:
        with self._lock:
            self._pending[attempt_id(cut.request_id, cut.epoch)] = cut

    def _lost(self, asked: pb.FollowRequest, reply: pb.FollowReply, context: Any) -> pb.FollowReply:
        """Make an encode worker's reply about an image useless, as if the worker had died just then."""
        wish = _WISH.search(asked.request_id)
        if wish is None or wish[2] != "e" or int(wish[1]) < 2:
            return reply
        if asked.epoch > 1 or not is_image(asked.request_id):
            return reply
        self.cuts[wish[0]] += 1
        if wish[1] == "2":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the test ends this call")
        shard = reply.complete.embedding.shard
        shard.address = _NOBODY
        for name in set(shard.offers) - {"grpc"}:
            del shard.offers[name]
        manifest.seal(reply.complete.embedding)
        return reply

    def _shortened(self, reply: pb.RunReply, up: queue.SimpleQueue[pb.RunRequest | None]) -> pb.RunReply:
        with self._lock:
            if not self._pending:
                return reply
            ended = self._cut_outputs(reply) + self._cut_manifests(reply)
        if ended:
            up.put(pb.RunRequest(abort=pb.Abort(request_ids=ended)))
        return reply

    def _cut_outputs(self, reply: pb.RunReply) -> list[str]:
        if not reply.engine_outputs:
            return []
        outputs, ended = wire.decode_outputs(reply.engine_outputs), []
        for output in outputs.outputs:
            cut = self._pending.get(output.request_id)
            if cut is None or cut.at_manifest:
                continue
            cut.generated += len(output.new_token_ids)
            if cut.generated == cut.at and output.finish_reason is not None:
                del self._pending[output.request_id]  # the answer is complete
            elif cut.generated >= cut.at:
                _trim(output, len(output.new_token_ids) - (cut.generated - cut.at))
                del self._pending[output.request_id]
                reply.failed.append(self._failed(cut.request_id, cut.epoch))
                ended.append(cut.request_id)
                if not cut.at:
                    keep = [one for one in reply.saved if one.request_id != cut.request_id]
                    del reply.saved[:]
                    reply.saved.extend(keep)
        if ended:
            reply.engine_outputs = wire.encode_outputs(outputs)
        return ended

    def _cut_manifests(self, reply: pb.RunReply) -> list[str]:
        ended = []
        for saved in list(reply.saved):
            key = attempt_id(saved.request_id, saved.epoch)
            if key in self._pending and self._pending[key].at_manifest:
                del self._pending[key]
                reply.saved.remove(saved)
                reply.failed.append(self._failed(saved.request_id, saved.epoch))
                ended.append(saved.request_id)
        return ended

    def _failed(self, request_id: str, epoch: int) -> pb.Failed:
        wish = _WISH.search(request_id)
        self.cuts[wish[0] if wish else request_id] += 1
        return pb.Failed(
            request_id=request_id,
            epoch=epoch,
            code=pb.Failed.CODE_STALE,  # the router retries at once, as after a death
            message="the test ends this attempt",
        )


def _trim(output: Any, keep: int) -> None:
    """Cut an output to its first `keep` tokens, as if the worker died after them."""
    del output.new_token_ids[keep:]
    output.finish_reason = output.stop_reason = None
    lists = output.new_logprobs
    if lists is not None:
        output.new_logprobs = lists._replace(
            logprob_token_ids=lists.logprob_token_ids[:keep],
            logprobs=lists.logprobs[:keep],
            sampled_token_ranks=lists.sampled_token_ranks[:keep],
        )


@contextmanager
def cutter() -> Iterator[Cutter]:
    """Serve a cutter on its `address`."""
    one = Cutter()
    with ThreadPoolExecutor(_STREAMS) as pool:
        server = grpc.server(pool, options=SERVER_OPTIONS)
        rpc.add_WorkerServicer_to_server(one, server)  # type: ignore[no-untyped-call]
        one.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield one
        finally:
            server.stop(None).wait(10)
