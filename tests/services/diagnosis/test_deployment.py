import re
import time
from contextlib import AsyncExitStack, asynccontextmanager

from baton import machine
from baton.protos import handoff_pb2, worker_pb2
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import load
from baton.services.diagnosis import deployment
from baton.services.diagnosis.doctor import examine
from baton.services.diagnosis.finding import Verdict
from baton.services.diagnosis.machine import Needs
from harness.fake_worker import FakeWorker
from harness.scheduling import Options
from harness.support import PATIENCE

SPEED = 50_000_000  # bytes per second


class Told(FakeWorker):
    """A fake worker whose clock, versions and pulls the test sets."""

    ahead_s = 0.0
    versions: dict[str, str] = {}  # noqa: RUF012
    problem = ""
    host = "here"
    pulled: list[worker_pb2.TryHandoffRequest]

    @property
    def identity(self):
        found = super().identity
        found.host = self.host
        found.capacity.transports[:] = ["shm", "tcp"]
        return found

    async def Inspect(self, request, _context):
        found = pb.Inspection() if request.clock_alone else machine.inspection()
        found.unix_s = time.time() + self.ahead_s
        found.versions.update(self.versions)
        found.kv_addresses.append(f"kv-of-{self.worker_id}:1")
        return found

    async def TryHandoff(self, request, _context):
        self.pulled.append(request)
        return handoff_pb2.TrialReply(
            bytes=request.bytes, seconds=request.bytes / SPEED, problem=self.problem
        )


@asynccontextmanager
async def deployed(*workers):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(SchedulerServer(Options(worker_lease_s=600.0)))
        client = await stack.enter_async_context(SchedulerClient(server.address, router_id="router-1"))
        for worker in workers:
            await stack.enter_async_context(worker)
            if isinstance(worker, Told):
                worker.pulled = []
            await client.register(worker.identity, pb.WORKER_STATE_READY)
        await client.refresh()
        yield client


async def found(*workers):
    async with deployed(*workers) as client:
        description = await client.describe()
        return [one async for one in deployment.findings(client, Needs(), description)]


def of(area, findings):
    return {one.subject: one for one in findings if one.area == area}


async def test_clocks_and_versions_that_differ_are_named():
    prefill, decode = Told("p", pb.ROLE_PREFILL), Told("d", pb.ROLE_DECODE)
    prefill.ahead_s, decode.ahead_s = -5.0, 3600.0
    decode.versions = {"vllm": "0.33.0", "torch": "2.14.0"}
    findings = await found(prefill, decode)
    clocks = of("clock", findings)
    verdicts = {name: one.verdict for name, one in clocks.items()}
    assert verdicts == {"scheduler": Verdict.OK, "p": Verdict.WARNING, "d": Verdict.WRONG}
    assert " behind the scheduler's, to within " in clocks["p"].what
    told_ms, within_ms = map(float, re.findall(r"([\d.]+) ms", clocks["p"].what)[:2])
    assert abs(told_ms - 5_000) <= within_ms + 10  # a busy machine answers late
    assert within_ms < 500 * PATIENCE
    versions = of("versions", findings)
    assert versions["vllm"].verdict is Verdict.WRONG
    assert "0.33.0: d" in versions["vllm"].what
    assert versions["torch"].verdict is Verdict.WARNING
    assert versions["baton"].verdict is Verdict.OK


async def test_each_pair_is_tried_over_what_may_reach():
    workers = [Told("p", pb.ROLE_PREFILL), Told("d", pb.ROLE_DECODE), Told("m", pb.ROLE_MIXED)]
    workers[1].host = "there"
    workers[2].problem = "DigestMismatch: block 3"
    findings = [one for one in await found(*workers) if one.area == "handoff"]
    tried = [(one.subject, one.what.partition(":")[0]) for one in findings]
    assert sorted(tried) == [
        ("m -> d", "tcp"),  # no shm between two machines
        ("p -> d", "tcp"),
        ("p -> m", "shm"),
        ("p -> m", "tcp"),
    ]
    slow = next(one for one in findings if one.subject == "p -> d")
    assert slow.verdict is Verdict.WARNING
    assert "tcp: 50 MB/s (16.8 MB in 335.5 ms)" in slow.what
    broken = [one for one in findings if one.subject == "p -> m"]
    assert {one.verdict for one in broken} == {Verdict.WRONG}
    assert "DigestMismatch: block 3" in broken[0].what
    assert sorted(list(one.sources) for one in workers[1].pulled) == [["kv-of-m:1"], ["kv-of-p:1"]]
    assert {one.bytes for one in workers[1].pulled} == {16 << 20}


async def test_a_worker_that_cannot_be_asked_is_a_problem():
    findings = await found(Told("p", pb.ROLE_PREFILL), FakeWorker("d", pb.ROLE_DECODE))
    assert of("workers", findings)["d"].verdict is Verdict.WRONG
    assert "worker d at 127.0.0.1:" in of("workers", findings)["d"].what


async def test_many_pairs_are_tried_in_part():
    some = Told("w0", pb.ROLE_MIXED)
    async with deployed(some) as client:
        workers = []
        for number in range(40):
            status = pb.WorkerStatus(identity=some.identity, state=pb.WORKER_STATE_READY)
            status.identity.worker_id = f"w{number}"
            workers.append(status)
        assert len(deployment.pairs(workers)) == 40 * 39
        findings = [one async for one in deployment._trials(client, workers)]
    assert "of 1560 pairs were tried" in findings[-1].what
    assert int(findings[-1].what.split()[0]) <= deployment.MAX_TRIALS


async def test_a_deployment_without_workers_is_a_problem_but_not_one_without_a_scheduler():
    async with deployed() as client:
        description = await client.describe()
        one = of("scheduler", [f async for f in deployment.findings(client, Needs(), description)])
        assert one["scheduler"].verdict is Verdict.WRONG
        assert "0 of 0 workers ready, 1 routers" in one["scheduler"].what
        settings = load({"scheduler": {"address": client.address}})
        whole = [f async for f in examine(settings)]
        assert one["scheduler"] in whole
    away = [f async for f in examine(load({"scheduler": {"address": client.address}}))]
    assert "no deployment was looked at" in of("scheduler", away)[client.address].what
    assert of("scheduler", away)[client.address].verdict is Verdict.OK
