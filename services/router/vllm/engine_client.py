"""The engine client under vLLM's front end: the workers are its engines.

Leans on: vllm.v1.engine.core_client.{EngineCoreClient, AsyncMPClient} (the members that AsyncLLM calls; they
are coroutines), vllm.v1.engine.EngineCoreRequest (its fields), vllm.lora.request.LoRARequest (name, number,
path), vllm.exceptions.{GracefulHTTPError, GenerationError} (AsyncLLM.generate passes the first on untouched,
streaming handlers turn the second into an event without a traceback; ours is both).
"""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

from baton.prefix_keys import NO_KEYS
from baton.rpc import MAX_MESSAGE_BYTES
from baton.scheduler.need import Adapter
from baton.services.classes import STANDARD
from baton.services.engine import step_checks, wire
from baton.services.engine.shapes import shape_of
from baton.services.engine.step_checks import LOOSEST, StepLimits
from baton.services.router.errors import RequestFailed, TooLarge, Unsupported
from baton.services.router.http.admission import Admission, current_admission
from baton.services.router.images import Image
from baton.services.router.relay import Relay
from baton.services.router.relay_parts import RelayParts
from baton.services.router.state import RequestState
from baton.services.router.vllm import logprobs, output_queue
from baton.services.router.vllm.block_hashes import PromptHasher
from baton.services.router.vllm.prepared_images import PreparedImages, places
from baton.services.tenants.model import salted

# Only the router, scheduler and workers set these arguments: clients must not control KV transfers.
_RESERVED = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")
_RESERVED_PREFIX = "baton"
# Limit of an encoded request: the other half of its message is for the tokens so far and a manifest.
MOST_BYTES = MAX_MESSAGE_BYTES // 2
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RefusedByRouter(GracefulHTTPError, GenerationError):
    """Wraps a RequestFailed so that vLLM's handlers give its status and text to the client."""

    def __init__(self, error: RequestFailed) -> None:
        super().__init__(error.message, error.status)
        self.status_code = error.status
        self.error = error


def refusal(error: RequestFailed) -> RefusedByRouter:
    """Return the exception to raise, after recording the error for the HTTP layer."""
    if admission := current_admission.get():
        admission.refuse(error)
    return RefusedByRouter(error)


@dataclass(frozen=True)
class RelayLimits:
    request_timeout_s: float
    max_model_len: int  # tokens
    model: str = ""  # its served name
    flush_s: float = 0.0  # how long outputs wait for more tokens of their request
    hasher: PromptHasher | None = None  # None until a worker has reported how blocks are named
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # LoRA adapters, by name
    steps: StepLimits = LOOSEST  # limits of an engine's step


class RelayClient(EngineCoreClient):
    """Takes requests from AsyncLLM and returns outputs. For one event loop; not thread-safe."""

    def __init__(self, parts: RelayParts, limits: RelayLimits) -> None:
        self.resources = SimpleNamespace(engine_dead=False)  # never set: workers come and go
        self.engine_ranks_managed = [0]
        self._parts = parts
        self.limits = limits  # limits of new requests; may be replaced
        self._queue = output_queue.OutputQueue(parts.pool.lag_s, limits.flush_s)
        self.prompt_logprobs = logprobs.PromptLogprobs(self._put_first, self._give_up)
        self._images = PreparedImages()
        self._relays: dict[str, Relay] = {}  # keyed by the front end's request id
        self._admissions: dict[str, Admission] = {}
        # Set by the front end: ends a request with an error.
        self.on_failure: Callable[[str, Exception], None] = lambda *_: None

    # -- for AsyncLLM

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> Any:
        """Wait for outputs; return all available ones in one EngineCoreOutputs."""
        return await self._queue.take()

    async def add_request_async(self, request: Any) -> None:
        """Start a request without waiting for its placement. A request's sequences are placed separately.

        Raises RefusedByRouter; a later refusal ends the request through `fail`.
        """
        admission = current_admission.get()
        taken = time.monotonic()
        try:
            if admission is not None and admission.error is not None:
                raise admission.error
            self._check(request)
            split = await self._images.split(request.mm_features or (), request.prompt_token_ids)
            relay = self._relay(request, admission or Admission(), taken, *split)
            await self._start(relay, admission)
        except RequestFailed as error:
            raise refusal(error) from None
        self._relays[request.request_id] = relay
        if admission is not None:
            admission.states.append(relay.state)
            self._admissions[request.request_id] = admission

    def check_room(self) -> None:
        """Check that there is room for another request, before it is rendered. Raises RefusedByRouter."""
        try:
            self._parts.journal.check_room()
            admission = current_admission.get()
            self._parts.waiting.check_room(admission.service if admission is not None else STANDARD)
        except RequestFailed as error:
            self._parts.metrics.turned_away(error)
            raise refusal(error) from None

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.abort(request_ids)

    async def add_lora_async(self, lora_request: Any) -> bool:
        """Accept the settings' adapters, which vLLM's front end adds at its start; workers load them.

        Raises RefusedByRouter for any other adapter.
        """
        if lora_request.lora_name not in self.limits.adapters:
            raise RefusedByRouter(_not_offered("add_lora_async"))
        return True

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: the engines have no caches of prepared images."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Drop all requests. The pool closes the streams."""
        del timeout
        self.abort(list(self._relays))

    def end_all(self) -> None:
        """End the remaining requests with the error that the router is shutting down."""
        for relay in list(self._relays.values()):
            relay.end()

    def dp_engines_running(self) -> bool:
        return bool(self._relays)

    # -- for relays (FrontEnd)

    def deliver(self, output: Any) -> None:
        if not self.prompt_logprobs.takes(output):
            self._queue.put(output)

    def deliver_first(self, output: Any) -> None:
        """Queue an output that must not wait to be merged: the first one, or the first after a pause."""
        if not self.prompt_logprobs.takes(output):
            self._put_first(output)

    def finish(self, request_id: str, reason: str) -> None:
        """End a request without a further token."""
        self.deliver(output_queue.finish_output(request_id, reason))

    def fail(self, request_id: str, error: RequestFailed) -> None:
        """End a request with an error, and drop its queued outputs."""
        if admission := self._admissions.get(request_id):
            admission.refuse(error)
        self._drop(request_id)
        self.on_failure(request_id, RefusedByRouter(error))

    def adapt(self, output: Any, clock_offset_s: float, *, resumed: bool) -> tuple[float, float]:
        """Convert an output's times to our clock; if `resumed`, drop what the front end already has.

        Return when the engine queued and first scheduled the request, seconds; 0 if unknown.
        """
        if resumed:
            output.new_prompt_logprobs_tensors = None  # the front end has them from the first prefill
        if output.events is None:
            return 0.0, 0.0
        output_queue.rebase(output.events, clock_offset_s)
        began = output_queue.began_at(output.events)
        if resumed:
            output.events = output_queue.only_preemptions(output.events)
        return began

    def watch(self, request_id: str, received: float) -> None:
        """Measure the time until the response's next piece is sent; its output arrived at `received`."""
        if admission := self._admissions.get(request_id):
            admission.watch(received)

    # -- for the router's own parts

    @property
    def live(self) -> int:
        return len(self._relays)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests here and on their workers. Unknown ids belong to finished requests."""
        for request_id in request_ids:
            self._drop(request_id)
            if relay := self._relays.get(request_id):
                relay.abort()

    def _put_first(self, output: Any) -> None:
        self._queue.put(output, at_once=True)

    def _give_up(self, request_id: str, error: RequestFailed) -> None:
        self.fail(request_id, error)
        self.abort([request_id])

    def _drop(self, request_id: str) -> None:
        self._queue.drop(request_id)
        self.prompt_logprobs.drop(request_id)

    async def _start(self, relay: Relay, admission: Admission | None) -> None:
        tenants = admission.request if admission is not None else None
        if tenants is not None:
            self._parts.journal.check(relay.state)
            await tenants.charge(relay.state)
        relay.state.charged = time.monotonic()
        try:
            relay.start()
        except RequestFailed as error:
            self._parts.metrics.turned_away(error)
            if tenants is not None:
                tenants.settle(relay.state)
            raise

    def _relay(
        self, request: Any, admission: Admission, now: float, features: list[Any], images: tuple[Image, ...]
    ) -> Relay:
        if admission.request is not None:
            request.cache_salt = salted(admission.request.caller, request.cache_salt)
        limits = self.limits
        params, prompt_tokens = request.sampling_params, len(request.prompt_token_ids)
        adapter = self._adapter(request)
        wire_id = _wire_id(request.request_id)
        encoded = _encode(request, wire_id, features)
        if len(encoded) > MOST_BYTES:
            raise TooLarge(
                f"the request's message to a worker has {len(encoded) >> 20} MiB; "
                f"{MOST_BYTES >> 20} are allowed"
            )
        state = RequestState(
            request_id=wire_id,
            frontend_id=request.request_id,
            engine_request=encoded,
            prompt_tokens=prompt_tokens,
            max_tokens=params.max_tokens,
            max_model_len=limits.max_model_len,
            logprobs=logprobs.at_a_token(params, limits.steps.vocabulary),
            prompt_logprobs=logprobs.of_the_prompt(params, limits.steps.vocabulary, prompt_tokens),
            deadline=min(admission.deadline, now + limits.request_timeout_s),
            party=admission.party,
            model=limits.model,
            adapter=adapter,
            service=admission.service,
            prefix=limits.hasher.keys(request) if limits.hasher is not None else NO_KEYS,
            images=images,
            image_places=places(features),
            response_id=request.external_req_id or request.request_id,
            trace=admission.trace,
            http=admission.http,
            taken=now,
            arrived=admission.http.received or now,
        )
        return Relay(state, self._parts, self, on_over=self._over)

    def _check(self, request: Any) -> None:
        steps = self.limits.steps
        _check(request, steps)
        logprobs.check(request.sampling_params, steps.vocabulary, len(request.prompt_token_ids))
        self._parts.journal.check_room()

    def _adapter(self, request: Any) -> Adapter | None:
        """Return the request's adapter; send its fingerprint instead of a path on this machine.

        Workers assign their own adapter numbers. Raises Unsupported.
        """
        wanted = request.lora_request
        if wanted is None:
            return None
        adapter = self.limits.adapters.get(wanted.lora_name)
        if adapter is None:
            raise Unsupported(f"the adapter {wanted.lora_name!r} is not served here")
        request.lora_request = LoRARequest(adapter.name, 1, adapter.fingerprint)
        return adapter

    def _over(self, relay: Relay) -> None:
        request_id = relay.state.frontend_id
        self._relays.pop(request_id, None)
        admission = self._admissions.pop(request_id, None)
        if admission is not None and admission.request is not None:
            admission.request.settle(relay.state)
        if admission is None or admission.http.ended:  # otherwise it is recorded once its response is sent
            self._parts.chronicle.over(relay.state)


def without_reserved(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a client's extra arguments without the reserved ones."""
    if not extra:
        return extra
    kept = {
        key: value
        for key, value in extra.items()
        if key not in _RESERVED and not key.startswith(_RESERVED_PREFIX)
    }
    return kept or None


def _check(request: Any, steps: StepLimits) -> None:
    if request.sampling_params is None or request.sampling_params.max_tokens is None:
        raise Unsupported("only text generation is served here")
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        raise Unsupported("a prompt of tokens is needed: prompt embeddings are not served here")
    if request.resumable or request.abort_immediately:
        raise Unsupported("streaming input is not served here")
    if problem := step_checks.problem(request.sampling_params, len(request.prompt_token_ids), steps):
        raise Unsupported(problem)


def _wire_id(request_id: str) -> str:
    """Return a request's id on the wire. Its client may have chosen any text (X-Request-Id)."""
    if _PLAIN_ID.fullmatch(request_id):
        return request_id
    return "h-" + hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()[:40]


def _encode(request: Any, wire_id: str, features: list[Any]) -> bytes:
    sent = copy(request)
    sent.mm_features = features or None
    sent.request_id = wire_id
    sent.external_req_id = None
    sent.trace_headers = None
    sent.data_parallel_rank = None
    sent.kv_hints = None
    sent.priority = 0  # the priority has chosen the class, which is sent with each Start
    sent.sampling_params = copy(request.sampling_params)
    sent.sampling_params.extra_args = without_reserved(sent.sampling_params.extra_args)
    return wire.encode_request(sent)


def request_digest(engine_request: bytes) -> bytes:
    """Return a digest of an encoded request's prompt and parameters, but not of its sender or time.

    The seed is left out, because it differs between the sequences of a request.
    """
    request = wire.decode_request(engine_request)
    request.request_id = ""
    request.arrival_time = 0.0
    request.client_index = request.priority = 0
    request.cache_salt = request.external_req_id = request.trace_headers = None
    if request.sampling_params is not None:
        request.sampling_params.seed = None
    return hashlib.sha256(wire.encode_request(request)).digest()


def request_shape(engine_request: bytes) -> str:
    """Return which fields an encoded request sets and how long they are, for the log."""
    return shape_of(wire.decode_request(engine_request))


def _refusing(name: str) -> Callable[..., Any]:
    async def refuse(self: RelayClient, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise RefusedByRouter(_not_offered(name))

    refuse.__name__ = name
    return refuse


def _not_offered(name: str) -> Unsupported:
    what = name.removesuffix("_async").replace("_", " ")
    return Unsupported(f"{what}: not offered by the router, because it concerns a single engine")


# All other calls of vLLM's client are for administrators of a single engine.
for _name, _method in (*vars(EngineCoreClient).items(), *vars(AsyncMPClient).items()):
    if inspect.iscoroutinefunction(_method) and _name not in vars(RelayClient):
        setattr(RelayClient, _name, _refusing(_name))
