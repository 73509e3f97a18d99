"""The connector's configuration: `KVTransferConfig.kv_connector_extra_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from baton.addresses import is_wildcard
from baton.handoff import ports
from baton.handoff.errors import HandoffError
from baton.kernels.kv_pack import WIRE_DTYPES

MIB = 1 << 20
MAX_PULL_S = 600.0  # a pull holds the source's KV, and a thread there, until its deadline
# limit for a prompt still being computed; if it takes longer, it is pulled at the prompt's end
EARLY_PULL_S = 540.0


@dataclass(frozen=True)
class HandoffConfig:
    """The settings' section `handoff` for one worker, and the worker's names."""

    worker_id: str
    transports: tuple[str, ...] | None  # best first; None: all usable ones, see transports/__init__.py
    host: str  # address on which KV is served
    port: int  # the first one of rank 0 (ports.py); 0: free ones
    staging_mib: int | None  # per rank; None: save/sizing.py decides by the room there is
    kv_wire_dtype: str  # how KV travels; all workers of a deployment have the same
    pull_timeout_s: float = 20.0
    lease_s: float = 30.0  # how long saved KV waits for a decode worker
    chunk_mib: int = 4  # moved at once
    advertise_host: str = ""  # under which others find it; `host` if empty
    model_fingerprint: str = ""  # of the weights: KV of other weights is never loaded
    identity: str = ""  # folder of the worker's certificate; plain text if empty
    insecure: bool = False  # plain text may be served to other machines
    drafter_fingerprint: str = ""  # of the weights of a draft model that has its own

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> HandoffConfig:
        """Build from connector settings.

        Raises HandoffError for a missing or unknown key, or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise HandoffError(
                f"kv_connector_extra_config: unknown {', '.join(unknown)}; allowed: {', '.join(known)}"
            )
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in needed if name not in extra]:
            raise HandoffError(f"kv_connector_extra_config: {', '.join(missing)} missing")
        if not extra["worker_id"]:
            raise HandoffError("kv_connector_extra_config: worker_id is empty; give the worker's unique name")
        named = extra["transports"]
        config = cls(**{**extra, "transports": None if named is None else tuple(named)})
        for name in ("staging_mib", "lease_s", "pull_timeout_s", "chunk_mib"):
            if (value := getattr(config, name)) is not None and value <= 0:
                raise HandoffError(f"kv_connector_extra_config: {name} is {value}; above 0 is needed")
        if is_wildcard(config.published_host):
            raise HandoffError(
                f"kv_connector_extra_config: host is {config.host}, which others cannot dial; give"
                " advertise_host"
            )
        if config.pull_timeout_s > MAX_PULL_S:
            raise HandoffError(
                f"kv_connector_extra_config: pull_timeout_s is {config.pull_timeout_s}; allowed: up to"
                f" {MAX_PULL_S:g}"
            )
        if config.kv_wire_dtype not in WIRE_DTYPES:
            raise HandoffError(
                f"kv_connector_extra_config: kv_wire_dtype is {config.kv_wire_dtype!r};"
                f" allowed: {', '.join(WIRE_DTYPES)}"
            )
        return config

    @property
    def published_host(self) -> str:
        """The host that others dial to reach the ranks' services."""
        return self.advertise_host or self.host

    def port_of(self, rank: int) -> int:
        """Return the port on which the rank's service listens; 0: a free port."""
        return ports.first(self.port, rank)

    @property
    def chunk_bytes(self) -> int:
        """Bytes moved at a time."""
        return self.chunk_mib * MIB
