"""All checks, in order: this machine, certificates, Redis, and the deployment if a scheduler answers."""

from __future__ import annotations

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
from baton.services.diagnosis.finding import About, Finding
from baton.services.diagnosis.machine import Needs
from baton.services.overview.commands import first_answer


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Yield findings as they are made, which takes seconds. Baton's own errors become findings."""
    async with SchedulerClient(settings.scheduler.address) as client:
        description: pb.Description | None = None
        try:
            identities.take_on(settings, Role.OPERATOR)
        except BatonError as error:
            problem = f"no certificate as an operator: {error}"
            answer: Finding | None = About("TLS", "this process").wrong(problem, "docs/security.md")
        else:
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
        except BatonError as error:  # a password file is unreadable
            yield About("Redis", "password").wrong(str(error), "see docs/security.md")
        if description is None:
            return
        needs = replace(Needs.of_worker(settings, 0), shm=0)  # running workers have their share already
        try:
            async for one in deployment.findings(client, needs, description):
                yield one
        except SchedulerError as error:
            yield About("scheduler", settings.scheduler.address).wrong(str(error), "try again")


async def _describe(client: SchedulerClient) -> tuple[pb.Description | None, Finding | None]:
    scheduler = About("scheduler", client.address)
    try:
        return await first_answer(client, SchedulerClient.describe), None
    except SchedulerUnavailable as error:
        return None, scheduler.ok(f"no deployment was looked at: {error}")
    except SchedulerError as error:
        return None, scheduler.wrong(str(error), "docs/security.md")
