"""Gangs of vLLM engines in child processes, each stepped by a host's thread and linked to the others.

`with Gang(options) as gang: gang.add(rank, name, prompt, tokens); gang.answers(names)`. A gang of one engine
is a plain engine. There is no scheduler: members find rank 0's address in a file. If engines are spread over
hosts (harness/netns.py), some members are limbs, which take no requests.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.handoff.reports import Loaded, Saved
from baton.services.worker.lifecycle import SWITCH_INTERVAL_S
from harness import zygote
from harness.netns import Host, move_to
from harness.ranks import alone_in_step, fork_ranks

START_S, CALL_S, END_S = 180.0, 60.0, 20.0  # generous: other engines may keep the machine busy
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    model: Path
    size: int = 2  # engines
    engine: dict[str, Any] = field(default_factory=dict)  # settings
    worker_id: str = "member"  # the name of its engines in handoffs
    core: int = 0  # the first engine's core


@dataclass(frozen=True)
class Place:
    """A member's place in the gang, which its child process receives."""

    options: Options
    rank: int
    folder: str  # folder of the gang's files
    cores: str
    host: tuple[str, int] = (LOOPBACK, 0)  # its address, and the id of a process on it; 0: this machine


@dataclass
class Times:
    """When a request was added, and when its engine had the first and the last token; CLOCK_MONOTONIC."""

    added: float
    first: float = 0.0
    ended: float = 0.0


@dataclass
class Look:
    """A member's state."""

    answers: dict[str, list[int]]
    ended: set[str]
    saved: dict[str, Saved]
    loaded: dict[str, Loaded]
    dummies: int
    steps: int
    wave: int
    running: bool
    failure: str
    lost: str


class Member:
    """A member in its child process. Its methods are called by name, in its event loop."""

    def __init__(self, place: Place) -> None:
        from baton import rpc
        from baton.services.config import Settings, load
        from baton.services.engine.build import EnginePlan
        from baton.services.engine.host import EngineHost

        options, address = place.options, place.host[0]
        engine: dict[str, Any] = {
            "model": str(options.model),
            "dtype": "float32",
            "max_model_len": 1024,
            "kv_cache_gib": 0.0625,
            "data_parallel_size": options.size,
            "expert_parallel": options.size > 1,
            "extra": {"skip_tokenizer_init": True},
        }
        settings: Settings = load(
            {
                "engine": engine | options.engine,
                "handoff": {"listen": f"{address}:0", "staging_mib": 64},
                "worker": {"cpu": place.cores},
                "security": {"insecure": address != LOOPBACK},
            }
        )
        rpc.act_as(None, insecure=settings.security.insecure)
        self._place, self._size = place, settings.engine.members
        plan = EnginePlan(settings, options.worker_id, "fingerprint", needs_handoffs=True)
        self._limb = place.rank % settings.engine.spread > 0
        self._plan = plan
        self._host: Any = None if self._limb else EngineHost(plan)
        self._answers: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._saved: dict[str, Saved] = {}
        self._loaded: dict[str, Loaded] = {}
        self._times: dict[str, Times] = {}
        self._served: dict[str, asyncio.Future[None]] = {}
        self._woken: dict[int, float] = {}
        self._alone: Any = None
        self._steps = 0
        self._failure = ""
        self._link: Any = None

    async def start(self) -> None:
        from baton.services.engine.data_parallel import GangRank
        from baton.services.engine.limb import LimbHost

        place, own = self._place, self._place.host[0]
        if self._size == 1:
            await self._host.start(self)
            return
        await self._connect(own, (lambda _: None) if self._limb else self._host.rung)
        world = await self._link.meet(START_S)
        rank = GangRank(place.rank, world.host, world.store_port, own)
        if not self._limb:
            await self._host.start(self, rank, self._link.ring)
            return
        self._host = LimbHost(replace(self._plan, gang=rank))
        self._link.lost.add_done_callback(lambda _: os._exit(1))  # as a limb's process does
        self._host.failed.add_done_callback(lambda _: os._exit(1))
        await self._host.start()

    async def _connect(self, own: str, rung: Any) -> None:
        from baton import rpc
        from baton.protos import gang_pb2, gang_pb2_grpc
        from baton.services.engine.data_parallel import open_store
        from baton.services.gang.link import Leader, Seat, Silence
        from baton.services.gang.link import Member as LinkOfMember

        place = self._place
        seat = Seat("gang", place.rank, self._size, f"member-{place.rank}", {})
        address = Path(place.folder) / "leader"
        if place.rank:

            async def find() -> str:
                return address.read_text() if address.exists() else ""

            self._link = LinkOfMember(seat, Silence(30.0, 30.0), rung, find)
            return

        def open_world() -> gang_pb2.World:
            self._store = open_store(own)
            return gang_pb2.World(life="one", host=own, store_port=self._store.port)

        self._link = Leader(seat, Silence(30.0, 30.0), rung, open_world)
        self._server = rpc.aio_server()
        gang_pb2_grpc.add_GangServicer_to_server(self._link, self._server)  # type: ignore[no-untyped-call]
        port = rpc.listen(self._server, "worker.listen", f"{own}:0")
        await self._server.start()
        draft = address.with_suffix(".draft")
        draft.write_text(f"{own}:{port}")
        draft.rename(address)

    # Called by the host.

    def on_step(self, step: Any) -> None:
        self._steps += step.executed
        self._saved |= {one.request_id: one for one in step.saved}
        self._loaded |= {one.request_id: one for one in step.loaded}
        outputs = ((group.timestamp, one) for group in step.outputs.values() for one in group.outputs)
        for made, output in outputs:  # `made` is the engine's time: this loop may be late
            name, times = output.request_id, self._times[output.request_id]
            self._answers[name] += output.new_token_ids
            times.first = times.first or made
            if output.finish_reason is not None:
                times.ended = made
                self._ended.add(name)
                if name in self._served:
                    self._served.pop(name).set_result(None)

    def on_refused(self, internal_id: str, error: Exception) -> None:
        self._failure = f"{internal_id}: {error}"

    def on_failure(self, error: BaseException, running: Collection[str] | None = None) -> None:
        del running
        self._failure = f"{type(error).__name__}: {error}"

    # Called by the test.

    async def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        drafts: Sequence[int] = (),
    ) -> None:
        """Queue a request. params: the handoff's; drafts: see first_drafts.give."""
        request = self._prepared(name, prompt, max_tokens, params, drafts)
        self._times[name] = Times(time.monotonic())
        self._host.submit(request)

    def _prepared(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        drafts: Sequence[int] = (),
    ) -> Any:
        from vllm.sampling_params import SamplingParams

        from baton.services.engine import wire
        from baton.services.engine.patches import first_drafts

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        request, _ = self._host._engine.preprocess_add_request(wire.new_request(name, prompt, sampling))
        request.kv_transfer_params = params
        if drafts:
            first_drafts.give(request, drafts)
        self._answers[name] = []
        return request

    async def serve(self, requests: dict[str, tuple[list[int], int]]) -> list[Times]:
        """Answer requests that arrive together (name -> prompt, number of tokens), then forget them."""
        loop = asyncio.get_running_loop()
        ends = [self._served.setdefault(name, loop.create_future()) for name in requests]
        prepared = [self._prepared(name, *own) for name, own in requests.items()]
        self._times |= {name: Times(time.monotonic()) for name in requests}
        for request in prepared:
            self._host.submit(request)
        await asyncio.gather(*ends)
        for name in requests:
            del self._answers[name]
        self._ended -= requests.keys()
        return [self._times.pop(name) for name in requests]

    async def keep_step(self, on: bool) -> None:
        """Turn a plain, idle engine into a gang of one, or back into a plain engine."""

        def change() -> bool:
            if on and self._alone is None:
                self._alone = alone_in_step(self._host)
            self._host._lockstep = self._alone if on else None
            return False

        self._host._messages.put(change)

    async def watch(self) -> None:
        """Note for each wave when this member rings or, if it does not, begins the first forward pass."""
        lockstep = self._host._lockstep
        assert lockstep is not None
        ring, dummy = lockstep._ring, lockstep._dummy

        def ringing(wave: int) -> None:
            self._woken[wave] = time.monotonic()
            ring(wave)

        def computing() -> None:
            self._woken.setdefault(lockstep.wave, time.monotonic())
            dummy()

        lockstep._ring, lockstep._dummy = ringing, computing

    async def woken(self) -> dict[int, float]:
        """Return what `watch` has noted, by wave; CLOCK_MONOTONIC."""
        return self._woken

    async def look(self) -> Look:
        lockstep = getattr(self._host, "_lockstep", None)
        lost = self._link.lost.result() if self._link is not None and self._link.lost.done() else ""
        return Look(
            self._answers,
            self._ended,
            self._saved,
            self._loaded,
            getattr(self._host, "dummy_steps", 0),
            self._steps,
            lockstep.wave if lockstep is not None else 0,
            lockstep.running if lockstep is not None else False,
            self._failure,
            lost,
        )

    async def stop(self) -> bool:
        return await asyncio.to_thread(self._host.stop)

    async def ranks(self) -> list[int]:
        """Return the process ids of a limb's ranks."""
        return [one.proc.pid for one in self._host._executor.workers]

    async def clock(self) -> float:
        return time.monotonic()


def serve(connection: Connection) -> None:
    """Run a member in the forked process: receive its place, then methods to call."""
    place: Place = connection.recv()
    if place.host[1]:
        move_to(place.host[1])
    if len(place.cores.split(",")) > 1 or place.options.engine.get("nodes", 1) > 1:
        fork_ranks()
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(_serve(connection, place))
    os._exit(0)  # a worker exits this way, too


async def _serve(connection: Connection, place: Place) -> None:
    with zygote.reporting(connection):
        member = Member(place)
        await member.start()
    connection.send((True, None))
    while (asked := await asyncio.to_thread(connection.recv)) is not None:
        name, arguments = asked
        with suppress(Exception), zygote.reporting(connection):
            connection.send((True, await getattr(member, name)(*arguments)))


class Gang:
    """The processes of a gang, forked from the zygote."""

    def __init__(self, options: Options, hosts: Sequence[Host] = ()) -> None:
        """hosts: one for each member; without any, all are on this machine."""
        from baton.services.config import EngineSettings

        self._folder = tempfile.TemporaryDirectory(prefix="baton-gang-")
        settings = EngineSettings(**({"data_parallel_size": options.size} | options.engine))
        self.heads = range(0, settings.members, settings.spread)
        cores = sorted(os.sched_getaffinity(0))
        self._members = []
        for rank in range(settings.members):
            own = (cores[(options.core + rank + n) % len(cores)] for n in range(settings.local_ranks))
            place = Place(options, rank, self._folder.name, ",".join(map(str, own)))
            if hosts:
                place = replace(place, host=(hosts[rank].address, hosts[rank].pid))
            self._members.append(zygote.Remote(f"member-{rank}", f"{__name__}:serve", place))

    @property
    def processes(self) -> list[zygote.Forked]:
        return [one.process for one in self._members]

    def __enter__(self) -> Gang:
        for member in self._members:
            member.receive(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        zygote.end_all(self.processes, END_S)
        for member in self._members:
            member.close(END_S)
        self._folder.cleanup()

    def add(
        self,
        rank: int,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        drafts: Sequence[int] = (),
    ) -> None:
        self.call(rank, "add", name, prompt, max_tokens, params, drafts)

    def looks(self) -> list[Look]:
        """Return the states of the members with engines."""
        return [self.call(rank, "look") for rank in self.heads]

    def answers(self, names: Collection[str]) -> dict[str, list[int]]:
        """Wait for these answers and return them."""
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            looks = self.looks()
            if failures := [one.failure or one.lost for one in looks if one.failure or one.lost]:
                raise RuntimeError(failures[0])
            if set(names) <= {name for one in looks for name in one.ended}:
                return {
                    name: tokens for one in looks for name, tokens in one.answers.items() if name in names
                }
            time.sleep(0.01)
        raise TimeoutError(f"no answers: {looks}")

    def still(self) -> list[Look]:
        """Wait until no member is running and all are in the same wave. Return their states."""
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            looks = self.looks()
            if not any(one.running for one in looks) and len({one.wave for one in looks}) == 1:
                return looks
            time.sleep(0.01)
        raise TimeoutError(f"the gang goes on: {looks}")

    def begin(self, requests: Sequence[dict[str, tuple[list[int], int]]]) -> None:
        """Let each member answer its requests; see Member.serve."""
        for member, own in zip(self._members, requests, strict=True):
            member.send(("serve", (own,)))

    def end(self) -> list[list[Times]]:
        """Wait for the answers that `begin` requested. Return their times."""
        return [member.receive(CALL_S) for member in self._members]

    def stop(self) -> list[bool]:
        """Let all members end their engines. Return whether each ended in time."""
        for rank in self.heads:
            self._members[rank].send(("stop", ()))
        return [self._members[rank].receive(CALL_S) for rank in self.heads]

    def call(self, rank: int, name: str, *arguments: Any) -> Any:
        """Call a member's method."""
        self._members[rank].send((name, arguments))
        return self._members[rank].receive(CALL_S)


def plain_answers(
    model: Path, prompts: Sequence[list[int]], tokens: Sequence[int], **engine: Any
) -> list[list[int]]:
    """Return a plain engine's answers: `tokens[n]` tokens to prompt n. engine: settings."""
    names = [str(number) for number in range(len(prompts))]
    with Gang(Options(model, size=1, engine=engine)) as plain:
        for name, prompt, count in zip(names, prompts, tokens, strict=True):
            plain.add(0, name, prompt, count)
        found = plain.answers(names)
    return [found[name] for name in names]
