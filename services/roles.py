"""The roles of workers.

A role only says what the scheduler places on a worker. Every worker except an encoder can prefill and decode,
so its role can change while it serves, and one side can stand in for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos import scheduler_pb2
from baton.services.config import EngineSettings, Settings, suggest
from baton.services.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """All that differs between workers of different roles."""

    name: str
    wire: scheduler_pb2.Role
    decodes: bool  # it generates answers, so it reports the acceptance of its drafts
    needs_handoffs: bool = True  # otherwise it can also serve models whose KV cannot be handed over
    generates: bool = True  # it has the language model, and can take any other such role


# Computes prompts and their first tokens, and keeps the KV until it is pulled.
PREFILL = Role("prefill", scheduler_pb2.ROLE_PREFILL, decodes=False)
# Pulls KV and decodes; also computes prompts that come without KV.
DECODE = Role("decode", scheduler_pb2.ROLE_DECODE, decodes=True)
# Does both: the aggregated mode.
MIXED = Role("mixed", scheduler_pb2.ROLE_MIXED, decodes=True, needs_handoffs=False)

# Computes the embeddings of images for workers that run prompts. It has no language model and no KV.
ENCODE = Role("encode", scheduler_pb2.ROLE_ENCODE, decodes=False, needs_handoffs=False, generates=False)

ROLES = {one.name: one for one in (PREFILL, DECODE, MIXED, ENCODE)}


def role(name: str) -> Role:
    """Return the role of this name. Raises ConfigError if it is unknown."""
    if name not in ROLES:
        raise ConfigError(f"there is no role {name!r}{suggest(name, list(ROLES))}")
    return ROLES[name]


def encoder_settings(settings: Settings) -> Settings:
    """Return the settings of an encode worker."""
    own = settings.model_copy(deep=True)
    own.engine = encoder_engine(own.engine)
    own.worker.gang = ""
    return own


def encoder_engine(engine: EngineSettings) -> EngineSettings:
    """Return the engine of an encode worker: one rank, without the language model's settings."""
    one = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nodes"), 1)
    off = dict.fromkeys(("expert_parallel", "enable_prefix_caching"), False)
    none = dict.fromkeys(("speculative_config", "lora"))
    return engine.model_copy(update=one | off | none, deep=True)


def check(one: Role, settings: Settings) -> None:
    """Raise ConfigError if a role cannot serve with these settings."""
    engine, nodes = settings.engine, settings.engine.nodes
    if not engine.divides:
        raise ConfigError(
            f"engine.nodes (value {nodes}): {engine.data_parallel_size} engine(s) (data_parallel_size) of "
            f"{engine.ranks} rank(s) (tensor_parallel_size * pipeline_parallel_size) are not divided evenly "
            f"among {nodes} machines"
        )
    if nodes > 1 and not settings.security.plain_ranks:
        raise ConfigError(
            f"engine.nodes is {nodes}: torch, NCCL and vLLM's queues carry data between the machines without "
            "TLS and without keys, and whoever reaches their ports can run code. If nobody else reaches that "
            "network, set security.plain_ranks (--security-plain-ranks)"
        )
    if settings.fleet.node_rank >= nodes > 1:
        raise ConfigError(
            f"fleet.node_rank (value {settings.fleet.node_rank}): engine.nodes is {nodes}: machines are 0 to "
            f"{nodes - 1}"
        )
    if not (one.generates or engine.images):
        raise ConfigError(
            "engine.extra.language_model_only: there is nothing to encode; leave out encode workers"
        )
    if one.needs_handoffs and settings.handoff.enabled is False:
        raise ConfigError(
            f"handoff.enabled is false, but a {one.name} worker needs handoffs: leave the key out, or start "
            "only mixed workers"
        )
