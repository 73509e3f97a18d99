"""Test doubles of a worker's peers: a router's stream, a follower (`followed`), a source (`telling`)."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason

from baton.attempts import attempt_id
from baton.protos import worker_pb2 as pb
from baton.protos import worker_pb2_grpc as rpc
from baton.rpc import aio_channel, aio_server
from baton.security.names import Role
from baton.services.engine import wire
from harness.support import PATIENCE, eventually

DEADLINE_S = 15.0 * PATIENCE
KEY = b"sixteen bytes ok"
PINNED = "baton_worker_handoffs_pinned"
PREFILL, DECODE, SAVE = pb.PHASE_PREFILL, pb.PHASE_DECODE, pb.PHASE_SAVE


def request(request_id, prompt, **params):
    """Return a request as the front end builds it, greedy and without end of sequence by default."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
    if sampling.structured_outputs is not None:
        sampling.structured_outputs._backend = "xgrammar"
    return wire.new_request(request_id, list(prompt), sampling)


def prompt(length, seed=0):
    """Return a prompt that differs from the first block on for different seeds."""
    step = 7 + seed // 250
    return [(seed * 31 + number * step + number * number // 3) % 250 for number in range(length)]


@dataclass
class Got:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # one per token
    prompt_logprobs: int = 0  # rows
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    saved: pb.Saved | None = None
    admitted: pb.Admitted | None = None
    shared: int = 0  # KV blocks shared with other requests
    failed: pb.Failed | None = None
    steps: list[int] = field(default_factory=list)  # tokens of each output
    drafts: Any = None  # vLLM's RequestSpecDecodeMetrics, as of the last output

    @property
    def over(self):
        return self.finish is not None or self.saved is not None or self.failed is not None

    def failure(self, code=pb.Failed.CODE_INVALID):
        """Check that it failed with this code; return the message."""
        assert self.failed is not None, self
        assert self.failed.code == code, self.failed
        return self.failed.message


class Stream:
    """One router's stream to one worker."""

    def __init__(self, stub, address=""):
        self.address = address
        self._call = stub.Run()
        self._got = {}  # last attempt of each request
        self._attempts = {}
        self.begun = []  # attempt ids in the order of their first outputs

    async def start(self, core, phase, *, epoch=1, written=(), source=None, prefix_tokens=0, name=""):
        """Start a phase. name: the request's id, if it differs from that of `core`."""
        self._begin(name or core.request_id, epoch)
        start = pb.Start(
            request_id=name or core.request_id,
            epoch=epoch,
            phase=phase,
            engine_request=wire.encode_request(core),
            output_token_ids=written,
            source=source,
            key=b"" if phase == DECODE else KEY,
            prefix_tokens=prefix_tokens,
        )
        await self.send(pb.RunRequest(start=start))

    def source(self, core, written=0, *, name="", tokens=0):
        """Return this worker as the source of a request's KV.

        written: earlier output tokens. name, tokens: of the save, if it has only the prompt's beginning.
        """
        return pb.Source(
            worker_id="source",
            address=self.address,
            request_id=name or core.request_id,
            key=KEY,
            tokens=tokens or len(core.prompt_token_ids or ()) + written,
        )

    async def send(self, message):
        await asyncio.wait_for(self._call.write(message), DEADLINE_S)

    async def abort(self, *request_ids):
        await self.send(pb.RunRequest(abort=pb.Abort(request_ids=request_ids)))

    def got(self, request_id):
        return self._got[request_id]

    async def end(self, request_id):
        """Read until this phase ends."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._got[request_id].over:
                await self._read()
        return self._got[request_id]

    async def some(self, request_id, tokens):
        """Read until it has generated `tokens` tokens."""
        async with asyncio.timeout(DEADLINE_S):
            while len((got := self._got[request_id]).tokens) < tokens:
                assert not got.over, f"it ended before: {got}"
                await self._read()
        return self._got[request_id]

    async def run(self, core, phase, **how):
        await self.start(core, phase, **how)
        return await self.end(how.get("name") or core.request_id)

    async def prefill(self, core, **how):
        """Run a PREFILL, whose KV must be saved."""
        got = await self.run(core, PREFILL, **how)
        assert got.saved is not None, got.failed
        assert got.saved.problem == ""
        return got

    async def alone(self, core):
        """Run a request whole under another name; return its tokens."""
        core.request_id = f"whole {core.request_id}"
        return (await self.run(core, DECODE)).tokens

    async def run_raw(self, start):
        self._begin(start.request_id, start.epoch)
        await self.send(pb.RunRequest(start=start))
        return await self.end(start.request_id)

    async def status(self):
        """Wait until the worker ends the stream, and return the status."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._call.code()

    def close(self):
        self._call.cancel()

    async def _read(self):
        reply = await self._call.read()
        assert reply is not grpc.aio.EOF, "the worker ended the stream"
        for saved in reply.saved:
            self._of(saved).saved = saved
        for admitted in reply.admitted:
            self._of(admitted).admitted = admitted
        for shared in reply.shared:
            self._of(shared).shared = shared.blocks
        for failed in reply.failed:
            self._of(failed).failed = failed
        if reply.engine_outputs:
            for output in wire.decode_outputs(reply.engine_outputs).outputs:
                got = self._attempts.get(output.request_id, Got())
                if not got.tokens:
                    self.begun.append(output.request_id)
                _gather(got, output)

    def _begin(self, request_id, epoch):
        self._got[request_id] = self._attempts[attempt_id(request_id, epoch)] = Got()

    def _of(self, message):
        return self._attempts.get(attempt_id(message.request_id, message.epoch), Got())


def _gather(got, output):
    assert got.finish is None, "an output after the last one"
    assert output.kv_transfer_params is None
    got.tokens += output.new_token_ids
    got.steps.append(len(output.new_token_ids))
    got.drafts = output.spec_decode_metrics or got.drafts
    got.finish, got.stop_reason = output.finish_reason, output.stop_reason
    if (found := output.new_logprobs) is not None:
        for ids, values in zip(found.logprob_token_ids, found.logprobs, strict=True):
            got.logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
    if output.new_prompt_logprobs_tensors is not None:
        got.prompt_logprobs += len(output.new_prompt_logprobs_tensors.logprobs)


@asynccontextmanager
async def connected(address):
    """Open a stream to the worker at `address`."""
    async with aio_channel(address, Role.WORKER) as channel:
        stream = Stream(rpc.WorkerStub(channel), address)
        try:
            yield stream
        finally:
            stream.close()


async def followed(source, epoch=1):
    """Follow an attempt to its end, as another worker."""
    request = pb.FollowRequest(request_id=source.request_id, epoch=epoch, key=source.key)
    async with aio_channel(source.address, Role.WORKER) as channel:
        return [reply async for reply in rpc.WorkerStub(channel).Follow(request, timeout=DEADLINE_S)]


async def kept(source, epoch=1):
    """Return a worker's final reply about a prompt whose KV it saved."""
    *_, last = await followed(source, epoch)
    assert last.HasField("complete"), last
    return last.complete


class _Telling(rpc.WorkerServicer):
    def __init__(self, replies):
        self._replies = replies

    async def Follow(self, request, context):
        del request
        for reply in self._replies:
            await context.write(reply)


@asynccontextmanager
async def telling(source, *replies):
    """Return another source, which sends these replies."""
    server = aio_server()
    rpc.add_WorkerServicer_to_server(_Telling(replies), server)
    other = pb.Source()
    other.CopyFrom(source)
    other.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield other
    finally:
        await server.stop(None)


async def hello(address, model="tiny", vllm_version="0.32.0", protocol=wire.PROTOCOL):
    request = pb.HelloRequest(router_id="test", model=model, vllm_version=vllm_version, protocol=protocol)
    async with aio_channel(address, Role.WORKER) as channel:
        return await rpc.WorkerStub(channel).Hello(request, timeout=DEADLINE_S)


def nothing_pinned(worker):
    """Wait until a worker holds no saved KV."""
    eventually(lambda: worker.figure(PINNED) == 0, 10, "nothing is pinned")
