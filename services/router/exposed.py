"""Serve the router's metrics on a separate port without an API key, for Prometheus and other routers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from starlette.routing import Route

from baton import addresses, rpc
from baton.metrics import MetricsServer, dialled
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.members import Member
from baton.services.config import RouterSettings
from baton.services.router.cluster import ClusterView
from baton.services.router.group import Seat
from baton.services.router.http.federation import Beside, Federation, route

log = logging.getLogger(__name__)
KIND = "router"


@contextlib.contextmanager
def exposed(
    settings: RouterSettings,
    router_id: str,
    schedulers: Iterable[SchedulerClient],
    views: Iterable[ClusterView],
    seat: Seat,
) -> Iterator[Route]:
    """Serve metrics inside the block, and register the address with the schedulers. Raises CannotServe.

    Yields the route of /metrics, which federates the metrics of all processes in `views`.
    """
    host = addresses.join(settings.host, settings.port)
    with MetricsServer(REGISTRY, "router.metrics_port", host, settings.metrics_port) as serving:
        where = serving.reached_at(addresses.split(dialled(host))[0])
        for client in schedulers:
            client.process = pb.Process(id=router_id, kind=KIND, host=rpc.host_id(), metrics_address=where)
        log.info("metrics on http://%s/metrics", serving.address)
        me = Member(router_id, KIND, rpc.host_id(), where)
        own_host, port = addresses.split(serving.address)
        seat.group.tell_metrics_port(seat.number, port)

        def group() -> dict[int, str]:
            return {
                number: addresses.from_here(addresses.join(own_host, port))
                for number, port in seat.group.metrics_ports().items()
            }

        def members() -> Iterable[Member]:
            # Routers appear in each model's view.
            return {member.id: member for view in views for member in view.members()}.values()

        yield route(Federation(me, REGISTRY, members, None if seat.alone else Beside(seat.number, group)))
