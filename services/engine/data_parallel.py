"""Make an engine one rank of a gang: vLLM's data parallelism, without its coordinator and front end.

Each rank is the only engine of its process, as with vLLM's external load balancing. The ranks' torch world
spans all of them, so they meet while they load. A second group lets them agree on whether any has work
(lockstep.py).

Leans on: vllm.config.ParallelConfig.{data_parallel_rank_local, _coord_store_port, stateless_init_dp_group,
has_unfinished_dp}, vllm.distributed.utils.create_tcp_store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.services.config import EngineSettings
from baton.services.engine.lockstep import Lockstep
from baton.services.errors import ConfigError


@dataclass(frozen=True)
class GangRank:
    """An engine's rank in its gang, and where the engines meet."""

    rank: int
    host: str
    store_port: int  # torch's TCPStore listens there


def open_store(host: str) -> Any:
    """Return a TCPStore at which engines can meet, with its `port`. It is served until it is deleted."""
    from vllm.distributed.utils import create_tcp_store

    with socket.create_server((host, 0)) as listener:  # otherwise it listens on all addresses
        return create_tcp_store(
            host,
            listener.getsockname()[1],
            listen_socket=listener,
            is_master=True,
            world_size=-1,
            wait_for_workers=False,
        )


def add_arguments(args: dict[str, Any], settings: EngineSettings, mine: GangRank | None) -> None:
    """Add engine arguments for experts and for a gang. Raises ConfigError for an impossible gang."""
    if settings.expert_parallel:
        args["enable_expert_parallel"] = True
    if mine is None:
        return
    if settings.pipeline_parallel_size > 1:
        raise ConfigError(
            f"engine.pipeline_parallel_size (value {settings.pipeline_parallel_size}): the engines of a gang "
            "(engine.data_parallel_size) cannot have stages: set one of the two to 1"
        )
    from vllm.engine.arg_utils import AsyncEngineArgs

    if not AsyncEngineArgs(**args).create_model_config().is_moe:
        raise ConfigError(
            f"engine.data_parallel_size (value {settings.data_parallel_size}): {settings.model} has no "
            "experts that engines could share: leave it out, and run more workers"
        )
    args["data_parallel_size"] = settings.data_parallel_size
    args["data_parallel_rank"] = mine.rank
    args["data_parallel_address"] = mine.host


def meet(config: Any, mine: GangRank) -> Any:
    """Wait for the engines of all ranks. Return the group in which they `agree`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are on one machine
    parallel = config.parallel_config
    parallel.data_parallel_rank_local = 0  # each rank sees its own devices alone
    parallel._coord_store_port = mine.store_port
    return parallel.stateless_init_dp_group()


def lockstep_of(engine: Any, ring: Callable[[int], None]) -> Lockstep | None:
    """Return the Lockstep of an engine in a gang; None without a gang. `ring`: see Lockstep."""
    if engine.dp_group is None:
        return None
    from vllm.config import ParallelConfig

    def agree(busy: bool) -> bool:
        return bool(ParallelConfig.has_unfinished_dp(engine.dp_group, busy))

    return Lockstep(agree, ring, engine.execute_dummy_batch)
