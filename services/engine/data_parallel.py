"""Make an engine one rank of a gang: vLLM's data parallelism, without its coordinator and front end.

Each rank is the only engine of its process. One torch world spans all ranks, so they meet while they load; a
second group lets them agree on whether any has work (lockstep.py). An engine on several machines (vLLM's
nnodes) is a gang, too: its members are the engine and the ranks of each further machine (limb.py).

Leans on: vllm.config.ParallelConfig.{data_parallel_rank_local, _coord_store_port, stateless_init_dp_group,
has_unfinished_dp, nnodes, node_rank, master_addr, master_port}, vllm.distributed.utils.create_tcp_store,
VLLM_HOST_IP, at which vLLM's queues listen, and torch's TORCHELASTIC_USE_AGENT_STORE.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from baton import addresses
from baton.services.config import EngineSettings
from baton.services.engine.lockstep import Lockstep
from baton.services.errors import ConfigError, StartError


@dataclass(frozen=True)
class GangRank:
    """A process's rank in its gang, and where the gang meets."""

    rank: int
    host: str
    store_port: int  # port of torch's TCPStore
    own_host: str  # IP address at which ranks on other machines reach this machine's ranks


def open_store(host: str) -> Any:
    """Return a TCPStore, with its `port`, at which engines can meet. It serves until it is deleted."""
    from vllm.distributed.utils import create_tcp_store

    with addresses.listen(host, 0) as listener:  # otherwise the store would listen on all addresses
        return create_tcp_store(
            host,
            listener.getsockname()[1],
            listen_socket=listener,
            is_master=True,
            world_size=-1,
            wait_for_workers=False,
        )


def add_arguments(args: dict[str, Any], settings: EngineSettings, mine: GangRank | None) -> None:
    """Add engine arguments for experts, machines and a gang. Raises ConfigError for an impossible gang."""
    if settings.expert_parallel:
        args["enable_expert_parallel"] = True
    if mine is None:
        return
    _choose_network(settings, mine)
    if settings.spread > 1:
        args["nnodes"], args["node_rank"] = settings.nodes, mine.rank
        args["master_addr"], args["master_port"] = mine.host, mine.store_port
    if settings.data_parallel_size == 1:
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
    args["data_parallel_rank"] = mine.rank // settings.spread
    args["data_parallel_address"] = mine.host


def network_of(own_host: str) -> str:
    """Return the name of the network interface that has this address. Raises StartError."""
    networks = psutil.net_if_addrs().items()
    own = (name for name, found in networks if own_host in {one.address for one in found})
    if not (interface := next(own, "")):
        raise StartError(
            f"no network of this machine has the address {own_host}, at which the other machines of its "
            "gang would reach its ranks: set handoff.listen or worker.advertise to one that it has"
        )
    return interface


def _choose_network(settings: EngineSettings, mine: GangRank) -> None:
    """Have ranks listen at this machine's address in the gang, unless environment variables say otherwise."""
    interface = network_of(mine.own_host)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    if settings.spread > 1:
        os.environ.setdefault("VLLM_HOST_IP", mine.own_host)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the gang's leader serves the store


def meet(config: Any, mine: GangRank) -> Any:
    """Wait for the engines of all ranks. Return the group in which they `agree`; None for a single engine."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return None
    parallel.data_parallel_rank_local = 0  # each rank sees only its own devices
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
