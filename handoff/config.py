"""The connector's configuration: `KVTransferConfig.kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.addresses import is_wildcard
from baton.handoff import ports
from baton.handoff.errors import HandoffError

MIB = 1 << 20
PULL_S = 20.0  # to pull a complete prompt, besides the time for its tokens
PULLED_TOKENS_PER_S = 4_000
MAX_PULL_S = 600.0  # maximum duration of a pull, which holds memory and a thread at the source
EARLY_PULL_S = 540.0  # limit for an early pull, during the prefill; then retried once the prompt is complete


@dataclass(frozen=True)
class HandoffConfig:
    """The `handoff` section of the settings, and facts about the worker."""

    worker_id: str
    transports: Sequence[str] | None  # best first; None: all usable ones
    host: str  # address on which KV is served
    port: int  # first port of rank 0 (ports.py); 0: free ports
    staging_mib: int | None  # per rank; None: see save/sizing.py
    kv_wire_dtype: str  # equal on all workers of a deployment
    lease_s: float = 30.0  # how long saved KV waits to be pulled
    chunk_mib: int = 4  # MiB moved at a time
    advertise_host: str = ""  # host that other workers dial; `host` if empty
    model_fingerprint: str = ""  # hash of the weights
    identity: str = ""  # folder of the worker's certificate; plain text if empty
    insecure: bool = False  # allow plain text to other machines
    drafter_fingerprint: str = ""  # hash of the draft model's own weights, if any

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> HandoffConfig:
        """Convert values that services/config has already checked individually. Raises HandoffError."""
        config = cls(**extra)
        if is_wildcard(config.published_host):
            raise HandoffError(
                f"handoff.listen: the host is {config.host}, which others cannot dial; set worker.advertise"
            )
        return config

    @property
    def published_host(self) -> str:
        return self.advertise_host or self.host

    def port_of(self, rank: int) -> int:
        return ports.first(self.port, rank)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_mib * MIB
