"""A worker's dispatcher with one router's stream, and an engine that records what it is given."""

import asyncio
from dataclasses import replace

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from baton.handoff.embeddings import Form
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_DECODE, Complete, Source, Start
from baton.services.engine import wire
from baton.services.engine.info import EngineInfo
from baton.services.engine.step import EngineStep
from baton.services.roles import MIXED
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.metrics import WorkerMetrics
from harness.scheduling import usual
from harness.support import PATIENCE
from tests.services.worker.router import KEY, prompt, request

INFO = EngineInfo(1024, 32, 64, 63, 8, 256, 1, 300, drafts_always=False)
GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="a+")}


class Engine:
    """Generates nothing; fails if a request is submitted or given its token twice."""

    block_hasher = None
    shelf = None

    def __init__(self):
        self.submitted = []
        self.aborted = []
        self.begun = []
        self.resumed = []
        self.requests = {}  # requests in the engine, by internal id
        self.loading = {}  # state of their loads: begun or given

    def embedding_puller(self):
        return EmbeddingPuller("idle", Form("", 1, "float32"), ["tcp"])

    def submit(self, request):
        assert request.request_id not in self.requests, "submitted twice"
        self.submitted.append(request.request_id)
        self.requests[request.request_id] = request

    def abort(self, internal_ids):
        self.aborted += internal_ids
        for one in internal_ids:
            self.end(one)

    def end(self, internal_id):
        self.requests.pop(internal_id, None)
        self.loading.pop(internal_id, None)

    def begin_load(self, internal_id, _epoch, _manifest):
        self.begun.append(internal_id)
        if internal_id in self.requests:
            assert internal_id not in self.loading, "begun twice, or after its end"
            self.loading[internal_id] = "begun"

    def resume(self, internal_id, _epoch, _manifest, _give_tokens):
        self.resumed.append(internal_id)
        if internal_id in self.requests:
            assert self.loading.get(internal_id) != "given", "its token is given twice"
            self.loading[internal_id] = "given"


class Compilers:
    """Grammar compilers that fail or wait on demand."""

    def __init__(self):
        self.broken = None
        self.compiled = asyncio.Event()
        self.compiled.set()
        self.cancelled = 0
        self.parties = []

    async def prepare(self, _request, party):
        self.parties.append(party)
        try:
            await self.compiled.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.broken is not None:
            raise self.broken

    def close(self):
        pass


class Worker:
    """Has room for 4 requests by default. Needs a running loop."""

    def __init__(self, engine=None, *, limits=None, **sizes):
        self.engine = engine or Engine()
        self.compilers = Compilers()
        self.metrics = WorkerMetrics()
        limits = limits or usual(max_queue_factor=1.0)
        self.dispatcher = Dispatcher(MIXED, limits, self.engine, self.metrics, None, grammars=self.compilers)
        self.dispatcher.open(replace(INFO, **{"max_num_seqs": 4, **sizes}))
        self.session = self.dispatcher.connect("router")

    def start(self, message, session=None, **given):
        if isinstance(message, str):
            message = start(message, **given)
        self.dispatcher.start(session or self.session, message)

    def incoming(self, name):
        attempt = self.dispatcher._attempts.live(f"{name}#1")
        assert attempt.incoming is not None
        return attempt.incoming

    def step(self, *outputs, session=None, reason=None, **step):
        """Run an engine step with these outputs; a name stands for one token of its first attempt."""
        found = [output(one, reason) if isinstance(one, str) else one for one in outputs]
        of_router = EngineCoreOutputs(outputs=found, timestamp=1.0)
        number = (session or self.session).number
        self.dispatcher.on_step(EngineStep(outputs={number: of_router}, executed=True, **step))

    def replies(self, session=None):
        queue = (session or self.session)._queue
        return [queue.get_nowait() for _ in range(queue.qsize())]

    def failed(self, session=None):
        return [one for reply in self.replies(session) for one in reply.failed]

    def codes(self):
        """Return the code of each failed request. Each fails once."""
        failed = self.failed()
        codes = {one.request_id: one.code for one in failed}
        assert len(codes) == len(failed), failed
        return codes

    async def failure(self):
        """Wait for a failure, which must be the only one."""
        async with asyncio.timeout(5 * PATIENCE):
            reply = await self.session._queue.get()
        [failed] = reply.failed
        return failed

    async def fails(self, code, text):
        failed = await self.failure()
        assert failed.code == code
        assert text in failed.message

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"baton_worker_{name}_total", labels) or 0.0


def output(name, reason=None, **given):
    return EngineCoreOutput(request_id=f"{name}#1", new_token_ids=[7], finish_reason=reason, **given)


def start(name, epoch=1, phase=PHASE_DECODE, **params):
    """Return the Start of a request with a prompt of 20 tokens."""
    encoded = wire.encode_request(request(name, prompt(20), **params))
    key = KEY if phase != PHASE_DECODE else b""
    return Start(request_id=name, epoch=epoch, phase=phase, engine_request=encoded, key=key)


def with_kv(message, tokens=20, **source):
    """Add a source, by default one at a closed port."""
    given = {"worker_id": "p", "address": "127.0.0.1:9", "key": KEY, **source}
    message.source.CopyFrom(Source(request_id=message.request_id, tokens=tokens, **given))
    return message


def complete(*tokens):
    return Complete(manifest=Manifest(request_id="a#1", epoch=1, num_tokens=20), token_ids=tokens)
