"""Build one vLLM EngineCore from our settings: its configuration and its cores.

Leans on: on a CPU, VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps a single rank in this process,
VLLM_CPU_OMP_THREADS_BIND assigns cores to rank processes, and OpenMP's threads inherit the affinity of the
thread that starts them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton import addresses, rpc
from baton.services.config import EngineSettings, Settings
from baton.services.decode.proposers import validation
from baton.services.engine import cache_events, cpu_mla, data_parallel, process
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.args import engine_args, from_hub, largest_image, takes_images
from baton.services.engine.data_parallel import GangRank
from baton.services.engine.fingerprint import model_fingerprint
from baton.services.engine.patches import continuation, draft_length, kept_images
from baton.services.engine.rank_settings import for_ranks
from baton.services.engine.refusals import reason
from baton.services.errors import ConfigError, StartError
from baton.services.prefill import fair_share

logger = logging.getLogger(__name__)

CONNECTOR = "BatonConnector"
CONNECTOR_MODULE = "baton.handoff.vllm.connector"
IMAGE_CONNECTOR, IMAGE_CONNECTOR_MODULE = "BatonECConnector", "baton.handoff.vllm.ec_connector"
# Tokens. The CPU kernels, except MLA's, need a multiple of 32; vLLM's default of 128 wastes space on short
# prompts.
CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_GIB = 1.0
# Share of the NUMA node's memory. vLLM checks it, although kv_cache_memory_bytes sets the cache's size. It is
# low so that several workers fit.
CPU_MEMORY_UTILIZATION = 0.2
_GIB = 1 << 30
_NOT_ON_CPU = ("enable_eplb", "enable_dbo")  # vLLM's CPU build accepts these, but then a request kills a rank


def parse_cores(cpu: str) -> list[int]:
    """Return the core numbers in `0`, `0-3` or `0,2-3`. Raises ConfigError."""
    cores: set[int] = set()
    try:
        for part in cpu.split(","):
            first, dash, last = part.partition("-")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores.clear()
    if not cores:
        raise ConfigError(f"worker.cpu: value {cpu!r} is not allowed: give cores as '0', '0-3' or '0,2-3'")
    missing = cores - os.sched_getaffinity(0)
    if missing:
        raise ConfigError(f"worker.cpu: value {cpu!r}: this process may not run on core {min(missing)}")
    return sorted(cores)


def cores_of_ranks(cpu: str, ranks: int) -> str:
    """Split cores evenly, in the form of VLLM_CPU_OMP_THREADS_BIND: `0,1|2,3`. Raises ConfigError."""
    cores = parse_cores(cpu) if cpu else sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise ConfigError(
            f"the engine has {ranks} ranks here (engine.tensor_parallel_size * "
            f"engine.pipeline_parallel_size), and this worker has {len(cores)} core(s): give it as many in "
            "worker.cpu"
        )
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


@dataclass(frozen=True)
class EnginePlan:
    settings: Settings
    worker_id: str
    fingerprint: str  # fingerprint of the model's files
    needs_handoffs: bool
    encodes: bool = False  # whether it is an encode worker's engine, which has only the vision tower
    adapters: tuple[AdapterFiles, ...] = ()
    kv_host: str = ""  # host at which other workers reach the ranks; empty: the host where the ranks listen
    gang: GangRank | None = None  # None: the engine is not in a gang


def build_config(plan: EnginePlan) -> Any:
    """Return the VllmConfig of this worker. Raises ConfigError, or vLLM's own errors."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    settings = plan.settings
    alone = settings.engine.ranks == 1
    args = engine_args(settings.engine)
    if settings.engine.kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int(settings.engine.kv_cache_gib * _GIB)
    if current_platform.is_cpu():
        _set_up_cpu(args, settings)
    elif "kv_cache_memory_bytes" in args:
        _gpu_arguments(args, current_platform.get_device_total_memory())
    args.setdefault("use_tqdm_on_load", False)
    args["distributed_executor_backend"] = "uni" if alone else "mp"
    if settings.handoff.enabled is not False and not plan.encodes:
        args["kv_transfer_config"] = _transfer_config(plan)
    if args["enable_prefix_caching"]:
        args["kv_events_config"] = cache_events.events_config(args.get("kv_events_config"))
    _add_speculation(args, plan)
    _add_fair_share(args, plan, on_cpu=current_platform.is_cpu())
    args["mm_processor_cache_gb"] = 0  # the router prepares images
    model_config = AsyncEngineArgs(**args).create_model_config()  # takes 0.02 s
    if current_platform.is_cpu():
        if model_config.use_mla:
            cpu_mla.add_arguments(args, model_config)
        args.setdefault("block_size", CPU_BLOCK_SIZE)
    if plan.encodes:
        _add_encoding(args, plan, model_config)
    elif takes_images(model_config):
        args["ec_transfer_config"] = image_connector()
    data_parallel.add_arguments(args, settings.engine, plan.gang)
    config = AsyncEngineArgs(**args).create_engine_config()
    _refuse_embeddings(config)
    _check_verification(config)
    _check_stages(config, plan.settings.engine)
    if config.cache_config.mamba_cache_mode != "none" and "kv_transfer_config" in args:
        if plan.needs_handoffs:
            raise ConfigError(
                f"engine.enable_prefix_caching (value true): model {settings.engine.model!r} keeps states, "
                "which are handed over only without a prefix cache: say --no-enable-prefix-caching, or serve "
                "it with mixed workers alone (--mixed)"
            )
        logger.warning("this model keeps states, and a prefix cache of them: it is served without handoffs")
        args["kv_transfer_config"] = None
        config = AsyncEngineArgs(**args).create_engine_config()
        _refuse_embeddings(config)
    if "long_prefill_token_threshold" not in args:
        step = config.scheduler_config.max_num_batched_tokens
        config.scheduler_config.long_prefill_token_threshold = fair_share.share_of(step)
    return config


def _refuse_embeddings(config: Any) -> None:
    """Reserve no room for embeddings from clients, which vLLM expects whenever there is a KV connector."""
    if (modalities := config.model_config.multimodal_config) is not None:
        modalities.enable_mm_embeds = modalities.allow_missing_mm_embeddings = False


def _transfer_config(plan: EnginePlan) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="fail",  # the router decides what to do next
        kv_connector_extra_config=_connector_config(plan),
    )


def _connector_config(plan: EnginePlan) -> dict[str, Any]:
    handoff = plan.settings.handoff
    return {
        **handoff.connector,
        "lease_s": 2 * plan.settings.scheduler.placement_lease_s,
        "host": handoff.host or addresses.split(plan.settings.worker.listen)[0],
        "advertise_host": plan.kv_host,
        "identity": str(rpc.identity_folder() or ""),
        "insecure": plan.settings.security.insecure,
        "worker_id": plan.worker_id,
        "model_fingerprint": plan.fingerprint,
        "drafter_fingerprint": _drafter_fingerprint(plan.settings.engine),
    }


def _add_encoding(args: dict[str, Any], plan: EnginePlan, model_config: Any) -> None:
    from vllm.config import SchedulerConfig

    if not takes_images(model_config):
        raise ConfigError(
            f"the model {plan.settings.engine.model!r} takes no images: leave out encode workers"
        )
    args["ec_transfer_config"] = image_connector("ec_producer", _connector_config(plan))
    step = args.get("max_num_batched_tokens") or SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    args["max_num_batched_tokens"] = max(step, largest_image(model_config), args.get("max_num_seqs") or 0)
    args["long_prefill_token_threshold"] = 0  # an image is computed whole
    args["async_scheduling"] = False  # with it, vLLM reports the steps of an encoder-only engine as no work
    args.pop("long_prefill_token_threshold_adaptive", None)


def _add_speculation(args: dict[str, Any], plan: EnginePlan) -> None:
    """Add vLLM's speculative_config and our settings. All roles get the same ones, because roles change."""
    spec, method = plan.settings.engine.speculative_config, validation.check(plan.settings.engine)
    if spec is None or method is None:
        return
    config = args["speculative_config"] = method.engine_config(spec)
    config["num_speculative_tokens"] = spec.limit
    # With a list (which draft_length may replace), the scheduler tells the ranks how many tokens to draft,
    # and does not pad a request's first step after a handoff with tokens that are sure to be rejected.
    # vLLM drops the list in a gang of several engines, which must draft alike.
    if plan.settings.engine.data_parallel_size == 1:
        config["num_speculative_tokens_per_batch_size"] = draft_length.lengths_by_batch(
            spec.limit, args["max_num_seqs"], adaptive=spec.adaptive
        )
    if spec.rejection_sample_method != "standard" and spec.verifier == "vllm":
        config["rejection_sample_method"] = spec.rejection_sample_method
    args.setdefault("per_request_spec_decode_metrics", "summary")
    args["additional_config"] = {**args.get("additional_config", {}), **for_ranks(spec, method.name)}


def _add_fair_share(args: dict[str, Any], plan: EnginePlan, *, on_cpu: bool) -> None:
    spec = plan.settings.engine.speculative_config
    if on_cpu:
        step = fair_share.step_tokens(plan.settings.engine.max_num_seqs, spec.limit if spec else 0)
        args.setdefault("max_num_batched_tokens", step)
    args.setdefault("scheduling_policy", "priority")
    args.setdefault("long_prefill_token_threshold_adaptive", True)


def measures_share(plan: EnginePlan) -> bool:
    """Return whether a prompt's share of a step follows from measured times: on a GPU, unless it is set."""
    from vllm.platforms import current_platform

    given = "long_prefill_token_threshold" in plan.settings.engine.extra
    return not given and not plan.encodes and not current_platform.is_cpu()


def _drafter_fingerprint(engine: EngineSettings) -> str:
    spec, method = engine.speculative_config, validation.check(engine)
    if spec is None or method is None or not method.keeps_kv or not spec.model:
        return ""
    try:
        # vLLM applies the revision only to the main model, and takes a draft model's newest revision.
        return model_fingerprint(spec.model, **{**from_hub(engine), "revision": None})
    except OSError as error:
        raise StartError(f"cannot read the draft model {spec.model!r}: {error}") from None


def _check_verification(config: Any) -> None:
    speculative = config.speculative_config
    if (
        speculative is not None
        and speculative.rejection_sample_method == "block"
        and not config.use_v2_model_runner
    ):
        raise ConfigError(
            "engine.speculative_config.rejection_sample_method (value 'block'): vLLM verifies blocks only in "
            "its model runner V2, which needs a GPU; say 'standard', or verifier 'baton'"
        )


def _check_stages(config: Any, engine: EngineSettings) -> None:
    spec, stages = engine.speculative_config, engine.pipeline_parallel_size
    if spec is None or stages == 1:
        return
    where = f"engine.pipeline_parallel_size (value {stages})"
    if not config.use_v2_model_runner:
        raise ConfigError(
            f"{where}: vLLM's model runner V1 cannot draft in a pipeline, and V2 needs a GPU: leave out "
            "engine.speculative_config, or the pipeline"
        )
    if spec.adaptive:
        raise ConfigError(
            f"{where}: several steps are under way at once, so none can be timed for num_speculative_tokens "
            "'auto': give engine.speculative_config.num_speculative_tokens a number"
        )


def image_connector(role: str = "ec_both", config: dict[str, Any] | None = None) -> Any:
    """Return the configuration of handoff/vllm/ec_connector.py. config: only an encode worker needs one."""
    from vllm.config import ECTransferConfig

    return ECTransferConfig(
        ec_connector=IMAGE_CONNECTOR,
        ec_role=role,
        ec_connector_module_path=IMAGE_CONNECTOR_MODULE,
        ec_connector_extra_config=config or {},
    )


def _set_up_cpu(args: dict[str, Any], settings: Settings) -> None:
    for name in _NOT_ON_CPU:
        if args.get(name):
            raise ConfigError(
                f"engine.extra.{name} (value {args[name]!r}): vLLM's CPU build cannot do that; leave it out"
            )
    args.setdefault("kv_cache_memory_bytes", int(CPU_KV_CACHE_GIB * _GIB))
    args.setdefault("gpu_memory_utilization", CPU_MEMORY_UTILIZATION)
    # Compiled, an 80 M model generated 3 to 13 % faster, but started in 42 s instead of 9 (one core,
    # bfloat16).
    args.setdefault("enforce_eager", True)
    # The KV cache's size is given, so vLLM need not profile the encoder at start, which takes seconds.
    args.setdefault("skip_mm_profiling", True)
    # By default oneDNN keeps compiled code for the last 1,024 shapes, 170 KiB each, in addition to what
    # vLLM keeps per layer. That cache grows for hours, by 170 MiB with the demo model, and speeds nothing up.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    engine = settings.engine
    if engine.ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(settings.worker.cpu, engine.local_ranks)


def _gpu_arguments(args: dict[str, Any], total: int) -> None:
    """Make vLLM check for room for the given KV cache, not nine tenths of a GPU. total: bytes of memory."""
    if cache := args.get("kv_cache_memory_bytes"):
        args.setdefault("gpu_memory_utilization", min(1.0, int(cache) / total))


def build_engine(plan: EnginePlan, on_rank_lost: Callable[[], None]) -> Any:
    """Load an EngineCore in the calling thread, which must be the one that steps it.

    This first pins the thread, and with it the compute threads that it starts, to `worker.cpu`. A thread of
    vLLM calls `on_rank_lost` if a rank's process dies. Raises ConfigError, or StartError with vLLM's reason.
    """
    settings = plan.settings
    if settings.worker.cpu and settings.engine.ranks == 1:
        _pin(parse_cores(settings.worker.cpu))
    process.lead_engine_processes()
    kept_images.several_ranks = settings.engine.ranks > 1
    with _explaining(settings.engine):
        config = build_config(plan)
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        executor = Executor.get_class(config)
        group = data_parallel.meet(config, plan.gang) if plan.gang is not None else None
        engine = EngineCore(config, executor, log_stats=True, executor_fail_callback=on_rank_lost)
        engine.dp_group = group  # as vLLM's own data-parallel engines do
        _load_adapters(engine, plan.adapters)
    _check_plugin()
    return engine


def build_limb(plan: EnginePlan, on_rank_lost: Callable[[], None]) -> Any:
    """Load an engine's ranks on a further machine; return their executor.

    The engine has no state here: these ranks get every step from the machine of the first rank. Calls
    `on_rank_lost` like `build_engine`, and raises the same errors.
    """
    process.lead_engine_processes()
    with _explaining(plan.settings.engine):
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = MultiprocExecutor(build_config(plan))
    executor.register_failure_callback(on_rank_lost)
    _check_plugin()
    return executor


@contextmanager
def _explaining(engine: EngineSettings) -> Iterator[None]:
    try:
        yield
    except (ConfigError, StartError):
        raise
    except Exception as error:
        why = reason(error, engine.extra)
        raise StartError(f"the engine could not load {engine.model!r}: {why}") from error


def _check_plugin() -> None:
    if not continuation.installed():
        raise StartError(
            "vLLM did not load Baton's plug-in: pip install the package, and name it in VLLM_PLUGINS if set"
        )


def _load_adapters(engine: Any, adapters: Sequence[AdapterFiles]) -> None:
    from vllm.lora.request import LoRARequest

    for number, adapter in enumerate(adapters, start=1):
        try:
            engine.add_lora(LoRARequest(adapter.name, number, adapter.path))
        except Exception as error:
            where = f"engine.lora.adapters.{adapter.name} (value {adapter.path!r})"
            raise StartError(f"{where}: vLLM refuses it: {reason(error)}") from error


def _pin(cores: list[int]) -> None:
    import torch

    os.sched_setaffinity(0, cores)  # 0: the calling thread
    torch.set_num_threads(len(cores))
