"""The sections router, security, ops and tracing."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from baton import addresses
from baton.redis_url import KINDS, is_redis
from baton.services.config.fields import (
    Address,
    Count,
    Port,
    Seconds,
    Secret,
    Section,
    one_password,
)

WAIT_SHARE, REPLACE_SHARE = 0.5, 0.1  # fractions of request_timeout_s


class MediaSettings(Section):
    """Images in requests (docs/images.md)."""

    allowed_domains: list[str] = Field(default_factory=list)
    """Hosts, or host:port, from which images are fetched by URL (docs/security.md)."""
    max_images: Annotated[int, Field(ge=1, le=256)] = 16
    """Maximum number of images in a request."""
    max_megapixels: Annotated[int, Field(ge=1, le=256)] = 16
    """Maximum number of pixels in all images of a request, in millions."""
    encode_min_tokens: Annotated[int, Field(ge=0)] = 256
    """Encode workers compute images of at least this many tokens; shorter ones stay with the prompt."""

    @field_validator("allowed_domains")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for one in value:
            if not re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", one):
                raise ValueError(f"{one!r} is not a host, such as images.example.com or 192.0.2.1:8080")
        return [one.lower() for one in value]


class RouterSettings(Section):
    """The router and its OpenAI-compatible HTTP API."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for IPv6 as well."""
    port: Port = 8000
    """TCP port to listen on."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the port, each on a core of its own; they also share limits (docs/limits.md)."""
    api_key: Secret | None = None
    """Key that clients must send as a bearer token, or file:PATH of a file with several, one per line
    (docs/limits.md)."""
    keys_file: str = ""
    """YAML file of keys with tenants and limits, instead of api_key (docs/tenants.md). Changes take effect
    without a restart."""
    keys_store: str = Field("", repr=False)
    """A Redis, as in scheduler.store, for limits across routers and, without keys_file, for the keys."""
    metrics_port: Port = 0
    """Port of /metrics, without a key, on router.host; 0 takes a free one on loopback. Several processes take
    consecutive ports."""
    request_timeout_s: Seconds = 600.0
    """Time limit for a request. Clients may set a shorter one in `X-Request-Timeout` (seconds). A request
    waits for half of it at most for room on the workers, and after a failure for a tenth for another one;
    then it gets 503."""
    max_waiting: Count = 2048
    """Maximum number of requests that wait for room on the workers; further ones get 503. 0: no request
    waits."""
    drain_timeout_s: Seconds = 10.0
    """Time limit for running requests after SIGTERM."""
    max_body_mib: Annotated[int, Field(ge=1, le=1024)] = 8
    """Largest request body, in MiB; a larger one gets 413."""
    media: MediaSettings = Field(default_factory=MediaSettings)
    """Images: maximum number and pixels per request, and hosts from which they are fetched by URL
    (docs/images.md, docs/security.md)."""
    chat_template: str = ""
    """Chat template, as a file or text; the model's own by default (docs/frontend.md)."""
    frontend: dict[str, Any] = Field(default_factory=dict)
    """Further front-end arguments, by vLLM's names (docs/frontend.md)."""
    flush_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Tokens of a stream are sent together at this interval, except the first and last, to save CPU."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Log level of the HTTP server; info logs every request (docs/observability.md)."""

    @property
    def max_wait_s(self) -> float:
        """Longest wait for room on the workers."""
        return self.request_timeout_s * WAIT_SHARE

    @property
    def replace_wait_s(self) -> float:
        """Longest wait for another worker after a failure."""
        return self.request_timeout_s * REPLACE_SHARE

    @property
    def has_tenants(self) -> bool:
        """Whether keys belong to tenants."""
        return bool(self.keys_file or self.keys_store)

    @property
    def url(self) -> str:
        """The URL for processes on the same machine."""
        return f"http://{addresses.from_here(addresses.join(self.host, self.port))}"

    @field_validator("keys_store")
    @classmethod
    def _is_redis(cls, value: str) -> str:
        if value and not is_redis(value):
            raise ValueError(f"use {KINDS}")
        return one_password(value)

    @model_validator(mode="after")
    def _fits_together(self) -> RouterSettings:
        if self.metrics_port + self.processes > 1 << 16:
            raise ValueError("metrics_port is the first of one port per process: choose a lower one")
        if self.api_key and self.has_tenants:
            raise ValueError("keys_file and keys_store replace api_key: leave it out")
        return self


class SecuritySettings(Section):
    """Security between the parts of a deployment (docs/security.md)."""

    tls: bool = False
    """Mutual TLS between all processes, each with a certificate for its role."""
    ca: str = "~/.baton/ca"
    """Folder of the CA (`baton ca init`), for processes on the same machine. `baton up` creates one if there
    is none."""
    join: Address = ""
    """host:port of `baton ca serve`, where processes on other machines get certificates."""
    token: Secret | None = None
    """Token for security.join (`baton ca token`), or file:PATH."""
    topic: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Name of the deployment in its certificates; scheduler.topic if unset."""
    folder: str = ""
    """Folder with this process's tls.key, tls.crt and ca.crt. Without security.join, you provide and renew
    them."""
    insecure: bool = False
    """Accept connections from other machines without TLS: only on a network that you trust."""
    plain_ranks: bool = False
    """Let the ranks of an engine or gang on several machines (engine.nodes) exchange data without TLS and
    without keys, even if tls is on: only on a network that nobody else can reach (docs/security.md)."""

    @model_validator(mode="after")
    def _is_on_where_it_is_meant(self) -> SecuritySettings:
        given = [key for key in ("join", "token", "folder") if getattr(self, key)]
        if given and not self.tls:
            raise ValueError(f"{' and '.join(given)} without tls: turn security.tls on, or leave them out")
        self.refuse_both("tls", "insecure")
        if self.token and not self.join:
            raise ValueError("token without join: give the address of `baton ca serve`")
        return self


class OpsSettings(Section):
    """The live page of a router (docs/operations.md)."""

    listen: Address | None = None
    """host:port of the live page, /ops; empty turns it off. If unset, `baton up` serves it on loopback, next
    to router.port, and other routers do not."""
    key: Secret | None = None
    """Key that the page asks for, or file:PATH; required if it is reachable from other machines."""


class TracingSettings(Section):
    """Traces of requests with OpenTelemetry (docs/tracing.md)."""

    endpoint: str = ""
    """Collector: http://host:4317 for OTLP over gRPC, http://host:4318/v1/traces (any path) for OTLP over
    HTTP; https:// for TLS. If unset there are no traces. Its API key goes into OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of traces to keep. Failed and retried requests, those that clients sample, and those whose first
    token takes longer than twice slo.ttft_ms are always traced."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        found = re.fullmatch(r"https?://([^/\s?]+)[^\s?]*(\?\S*)?", value)
        if value and not found:
            raise ValueError("use http://host:4317 (gRPC), http://host:4318/v1/traces (HTTP), or https://")
        if found and ("@" in found[1] or found[2]):
            raise ValueError("the URL is logged: put credentials into OTEL_EXPORTER_OTLP_HEADERS")
        return value
