"""All checks, in order: this machine, certificates, Redis, and the deployment if a scheduler answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError, SchedulerUnavailable
from baton.security.names import Role
from baton.services import identities
from baton.services.config import Settings
from baton.services.diagnosis import certificates, deployment, local, stores
from baton.services.diagnosis.finding import Finding, ok, wrong
from baton.services.diagnosis.machine import Needs


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Yield findings as they come; this takes seconds. Baton's own errors become findings."""
    refused = _become_operator(settings)
    async with SchedulerClient(settings.scheduler.address) as client:
        description: pb.Description | None = None
        answer: Finding | None = refused
        if refused is None:
            description, answer = await _describe(client)
        for one in local.findings(settings, runs=description is not None):
            yield one
        if answer is not None:
            yield answer
        for one in certificates.findings(settings):
            yield one
        try:
            async for one in stores.findings(settings):
                yield one
        except BatonError as error:  # a password file cannot be read
            yield wrong("Redis", "password", str(error), "see docs/security.md")
        if description is None:
            return
        needs = replace(Needs.of_worker(settings, 0), shm=0)  # running workers have their share already
        try:
            async for one in deployment.findings(client, needs, description):
                yield one
        except SchedulerError as error:
            yield wrong("scheduler", settings.scheduler.address, str(error), "try again")


def _become_operator(settings: Settings) -> Finding | None:
    try:
        identities.take_on(settings, Role.OPERATOR)
    except BatonError as error:
        return wrong("TLS", "this process", f"no certificate as an operator: {error}", "docs/security.md")
    return None


async def _describe(client: SchedulerClient) -> tuple[pb.Description | None, Finding | None]:
    for _ in range(client.schedulers - 1):
        with contextlib.suppress(SchedulerUnavailable):
            return await client.describe(), None
    try:
        return await client.describe(), None
    except SchedulerUnavailable as error:
        return None, ok("scheduler", client.address, f"no deployment was looked at: {error}")
    except SchedulerError as error:
        return None, wrong("scheduler", client.address, str(error), "docs/security.md")
