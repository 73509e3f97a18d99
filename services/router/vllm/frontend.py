"""vLLM's OpenAI front end over the router's engine client: app, handlers and tokenizer, without an engine.

Leans on: vllm.engine.arg_utils.AsyncEngineArgs.{create_model_config, create_structured_outputs_config,
create_logging_config, _set_default_reasoning_config_args, enable_lora, max_lora_rank, max_loras,
max_cpu_loras}, vllm.config.VllmConfig built from them alone (as vLLM's GPU-less render server does),
vllm.config.lora.LoRAConfig, vllm.entrypoints.openai.models.protocol.LoRAModulePath, vllm.v1.engine.async_llm
(AsyncLLM.__init__, which asks its module's EngineCoreClient.make_async_mp_client; _add_request;
check_admission, which handlers call before they render; output_processor.{request_states, abort_requests}; a
request's state there: parent_req, queue, logprobs_processor), vllm.entrypoints.launchers.{app.build_app,
api_server.app_state.init_app_state}, and the Starlette app that build_app returns (user_middleware,
build_middleware_stack, router.routes: path, endpoint; in it starlette's CORSMiddleware), the modules of
vLLM's routes that `_CLOSED_MODULES` names, envs.VLLM_API_KEY (build_app's own, narrower guard: turned off).
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.exceptions import VLLMError
from vllm.v1.engine import async_llm
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from baton.protos import scheduler_pb2
from baton.services.classes import Classes
from baton.services.config import EngineSettings, Settings
from baton.services.engine.args import engine_args, model_names
from baton.services.engine.refusals import reason
from baton.services.engine.step_checks import StepLimits
from baton.services.errors import StartError
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.errors import Unsupported
from baton.services.router.http.admission import AdmissionMiddleware
from baton.services.router.http.forms import ErrorForms
from baton.services.router.media.door import MediaDoor
from baton.services.router.tenancy import Tenancy
from baton.services.router.vllm import large_answers
from baton.services.router.vllm.block_hashes import PromptHasher
from baton.services.router.vllm.endings import adopt_responses, tell_cut_calls
from baton.services.router.vllm.engine_client import RelayClient, refusal, without_reserved
from baton.services.router.vllm.error_responses import (
    UNFORESEEN,
    bound_error_texts,
    not_offered,
    unforeseen,
    word_stream_errors,
)
from baton.services.router.vllm.frontend_args import frontend_namespace
from baton.services.router.vllm.images import drop_images, use_admitted_images
from baton.services.router.vllm.messages import adopt_messages
from baton.services.router.vllm.metrics import EngineMetrics, ModelWorkers
from baton.services.router.vllm.models import ModelMiddleware, health_routes, model_paths, model_routes
from baton.services.router.vllm.prepared_images import name_images
from baton.services.router.vllm.quick_unions import quicken_requests
from baton.services.router.vllm.request_limits import leave_to_workers, limit_requests, size_problem
from baton.services.router.vllm.response_store import ResponseStore, response_routes
from baton.services.router.vllm.tokenizing import bound_tokenizing

# vLLM's routes for administrators of a single engine, for other kinds of models, or for developers
# (VLLM_SERVER_DEV_MODE): those can end other clients' requests, empty all caches and show the configuration.
_CLOSED_PATHS = (
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/v1/systemone",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_CLOSED_MODULES = (
    "vllm.entrypoints.rl.",
    "vllm.entrypoints.serve.dev.",
    "vllm.entrypoints.serve.elastic_ep.",
    "vllm.entrypoints.serve.fault_tolerance.",
    "vllm.entrypoints.serve.profile.",
)


PREPARED_GIB = 1.0  # cache of prepared images; vLLM's default is 4


def build_config(settings: Settings) -> Any:
    """Return a front end's VllmConfig: model configuration and tokenizer, without a device or weights.

    Raises ConfigError for arguments that Baton refuses, StartError for arguments that vLLM refuses.
    """
    arguments = {"mm_processor_cache_gb": PREPARED_GIB, **engine_args(settings.engine)}
    envs.VLLM_CPU_KVCACHE_SPACE = 0  # otherwise the CPU platform warns about a KV cache
    with _refusals(settings.engine):
        args = AsyncEngineArgs(**arguments)
        model = args.create_model_config()
        args._set_default_reasoning_config_args()
        lora = None
        if args.enable_lora:
            ranks, most = args.max_lora_rank, args.max_loras
            lora = LoRAConfig(max_lora_rank=ranks, max_loras=most, max_cpu_loras=args.max_cpu_loras)
        model.quantization = None  # vLLM would check it against the local device
        config = VllmConfig(
            model_config=model,
            logging_config=args.create_logging_config(),
            structured_outputs_config=args.create_structured_outputs_config(),
            reasoning_config=args.reasoning_config,
            lora_config=lora,
        )
    # As if for several engines: otherwise vLLM would leave out prepared images that it has sent before.
    config.parallel_config._api_process_count = 2
    config.cache_config.enable_prefix_caching = True  # otherwise vLLM may count images instead of naming them
    name_images(config.model_config)
    # Accept only images that fit into every worker's encoder cache: each has room for the model's largest.
    config.scheduler_config.encoder_cache_size = 0
    if args.stream_interval is not None:
        config.scheduler_config.stream_interval = args.stream_interval
    return config


def build_arguments(settings: Settings, config: Any) -> Namespace:
    """Return the arguments of vLLM's app. Raises ConfigError."""
    engine, router = settings.engine, settings.router
    args = frontend_namespace(engine, router)
    args.model = config.model_config.model
    args.served_model_name = model_names(engine)
    args.host, args.port = router.host, router.port
    if engine.lora is not None:
        args.lora_modules = [LoRAModulePath(name, path) for name, path in engine.lora.adapters.items()]
    args.sse_keep_alive_interval = 0  # the router sends comments on every path, vLLM on two
    args.structured_outputs_config = config.structured_outputs_config
    return args


class RelayLLM(async_llm.AsyncLLM):
    """AsyncLLM over a RelayClient. Construct it inside the event loop.

    Raises StartError for a model or arguments that vLLM refuses.
    """

    def __init__(
        self,
        config: Any,
        client: RelayClient,
        cluster: ClusterView,
        engine: EngineSettings,
        metrics: EngineMetrics,
    ) -> None:
        bound_tokenizing()
        log_stats = not engine.extra.get("disable_log_stats")
        ours: list[Any] = [metrics.logger()] if log_stats else []
        with _refusals(engine), _engine_client(client):
            # With log_stats vLLM adds its default loggers, one of which reports every 10 s that no engine
            # is running.
            super().__init__(
                config, executor_class=Executor, log_stats=False, log_requests=False, stat_loggers=ours
            )
        if log_stats:
            model = config.model_config.served_model_name
            metrics.watch(ModelWorkers(cluster.heard, model, engine.enable_prefix_caching))
        self._cluster = cluster
        client.on_failure = self._request_failed
        client.prompt_logprobs.add = self._add_prompt_logprobs

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a request without reserved arguments, some of which vLLM's RequestState would read."""
        drop_images()
        if getattr(params, "extra_args", None):
            params.extra_args = without_reserved(params.extra_args)
        if problem := size_problem(params):
            raise refusal(Unsupported(problem))
        collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
        if isinstance(prompt, dict):
            prompt.pop("mm_kwargs", None)  # the handler keeps the prompt until the answer's end
        return collector

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Add a request, and unregister it if our client refuses it: vLLM's own client never does."""
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Check that there is room for a request. vLLM calls this before rendering and before adding it."""
        super().check_admission(n, request_id)
        self.engine_core.check_room()

    async def check_health(self) -> None:
        """Raise EngineDeadError, which vLLM turns into 503, if no request can be placed now."""
        if await self.health():
            raise EngineDeadError

    async def health(self) -> str:
        """Return why no request can be placed now, or "" if one can."""
        return await self._cluster.health()

    def learn(self, capacity: scheduler_pb2.Capacity) -> None:
        """Adopt what a worker's engine determined when loading, as vLLM's client does from its engine."""
        model, cache = self.model_config, self.vllm_config.cache_config
        model.max_model_len = min(model.max_model_len, capacity.max_model_len)
        cache.num_gpu_blocks = capacity.num_blocks
        cache.block_size = capacity.block_size
        client = self.engine_core
        hasher = PromptHasher(capacity.hashing) if capacity.HasField("hashing") else None
        limits = replace(client.limits, max_model_len=model.max_model_len, hasher=hasher)
        if capacity.HasField("steps"):
            steps = capacity.steps
            told = StepLimits(steps.vocabulary, steps.runner_v2, steps.drafts_always, steps.prompt_logprobs)
            limits = replace(limits, steps=told)
        client.limits = limits

    def _add_prompt_logprobs(self, request_id: str, rows: Any) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None:
            state.logprobs_processor._update_prompt_logprobs(rows)

    def _request_failed(self, request_id: str, error: Exception) -> None:
        """End a request and its siblings (n > 1), which share its stream."""
        processor = self.output_processor
        state = processor.request_states.get(request_id)
        if state is None:
            return  # the client has left
        whole = state.parent_req.request_id if state.parent_req is not None else request_id
        siblings = processor.abort_requests([whole], internal=True)
        state.queue.put(error)
        self.engine_core.abort([one for one in siblings if one != request_id])


@dataclass(frozen=True)
class ModelApp:
    """vLLM's app for one model, with the names of the model and its adapters."""

    app: Any
    names: Sequence[str]


async def build_model_app(llm: RelayLLM, args: Namespace, media: MediaDoor | None = None) -> Any:
    """Return vLLM's app for one model, with our limits, corrections and /health. `media` admits images.

    Clients reach it through `opened_to_clients`.
    """
    envs.VLLM_API_KEY = None  # build_app would guard only some paths with it; our door guards all paths
    leave_to_workers()
    tasks = await llm.get_supported_tasks()
    quicken_requests()
    bound_error_texts()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    use_admitted_images(llm.model_config)
    limit_requests(app.state, media)
    large_answers.install()
    word_stream_errors(app.state)
    tell_cut_calls(app.state)
    adopt_messages(app.state, media)
    adopt_responses(app.state)
    for kind in UNFORESEEN:
        app.exception_handler(kind)(unforeseen)
    app.exception_handler(HTTPException)(not_offered)
    app.router.routes = [route for route in app.router.routes if not _is_closed(route)]
    app.router.routes.insert(0, Route("/health", _health, methods=["GET"]))
    return app


def opened_to_clients(
    models: Sequence[ModelApp],
    tenancy: Tenancy,
    chronicle: Chronicle,
    *,
    classes: Classes | None = None,
    door: Middleware | None = None,
    comment_s: float = 0.0,
    store: ResponseStore | None = None,
) -> Any:
    """Return the first model's app behind our admission; it passes on requests for the other models.

    `tenancy` enforces tenants' limits, `chronicle` records times, `classes` defaults to the built-in ones,
    and `door` authenticates clients (None: all are accepted). Streams that are silent for `comment_s` seconds
    get a comment. `store` holds stored Responses.
    """
    app = models[0].app
    store = ResponseStore() if store is None else store
    for one in models:
        store.adopt(getattr(one.app.state, "openai_serving_responses", None))
    # Innermost, so that vLLM's metrics and log see the status that the client gets.
    app.user_middleware.append(
        Middleware(
            AdmissionMiddleware, tenancy=tenancy, chronicle=chronicle, classes=classes, comment_s=comment_s
        )
    )
    app.router.routes[:0] = [*model_routes(one.app for one in models), *response_routes(store)]
    if len(models) > 1:
        _choose_among(models)
    if door is not None:
        outer = [one.cls for one in app.user_middleware].index(CORSMiddleware)
        app.user_middleware.insert(outer + 1, door)
    # build_app has already built the stack, without our middleware.
    app.middleware_stack = ErrorForms(app.build_middleware_stack())
    envs.enable_envs_cache()  # otherwise vLLM reads its environment for every token
    return app


def _choose_among(models: Sequence[ModelApp]) -> None:
    first = models[0].app
    # None: the first app handles its own requests. Passing them to itself would never end.
    apps = {name: one.app if one.app is not first else None for one in models for name in one.names}
    for one in models[1:]:
        one.app.user_middleware.clear()  # the first app's middleware covers all apps
        one.app.middleware_stack = one.app.build_middleware_stack()
    first.user_middleware.append(Middleware(ModelMiddleware, apps=apps, paths=model_paths(first)))
    first.router.routes[:0] = health_routes({one.names[0]: one.app for one in models})


async def _health(request: Request) -> Response:
    if reason := await request.app.state.engine_client.health():
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
    return Response(status_code=200)


def _is_closed(route: BaseRoute) -> bool:
    """Return whether a vLLM route is closed.

    Of vLLM's two /metrics routes the mounted one stays, because it also serves OpenMetrics, with exemplars.
    """
    path = getattr(route, "path", "")
    module = getattr(getattr(route, "endpoint", None), "__module__", None) or ""
    return (
        path in _CLOSED_PATHS
        or f"{module}.".startswith(_CLOSED_MODULES)
        or (path == "/metrics" and not isinstance(route, Mount))
    )


@contextlib.contextmanager
def _engine_client(client: RelayClient) -> Iterator[None]:
    """Make AsyncLLM's constructor use `client` inside the block instead of starting an engine.

    AsyncLLM has no parameter for this. Only the name in its own module is replaced, during one constructor
    call, so nothing else in the process is affected.
    """

    class Source:
        @staticmethod
        def make_async_mp_client(**kwargs: Any) -> RelayClient:
            del kwargs
            return client

    original = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = Source
    try:
        yield
    finally:
        async_llm.EngineCoreClient = original


@contextlib.contextmanager
def _refusals(engine: EngineSettings) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, ImportError, VLLMError) as error:
        why = reason(error, engine.extra)
        raise StartError(f"vLLM refuses the model {engine.model!r} or an engine argument: {why}") from error
