"""The figures of `baton top`: the order of workers, sums by side, and the routers' rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.autoscale.histogram import SECONDS, quantile
from baton.autoscale.loads import increase, summed
from baton.protos import scheduler_pb2 as pb
from baton.services.overview.workers import Row, gangs_of

SHOWN_GANGS = 3
SIDES = ("prefill", "decode", "mixed", "encode")


@dataclass(frozen=True)
class Seen:
    """A description, and the time of its arrival (time.monotonic)."""

    at: float
    description: pb.Description


@dataclass(frozen=True)
class Traffic:
    """The routers' work between two descriptions: rates per second, times in seconds, None if unknown."""

    requests_s: float
    tokens_s: float
    waiting: int
    ttft: tuple[float, float] | None  # p50, p99
    itl: tuple[float, float] | None  # p50, p99 of the mean gaps of ended requests


Sort = Callable[[Row], object]
# The key `s` cycles through these; each puts the most notable workers first.
SORTS: Mapping[str, Sort] = {
    "name": lambda row: row.id,
    "load": lambda row: (-row.running - row.waiting, row.id),
    "KV": lambda row: (-(row.kv_usage or 0.0), row.id),
    "acceptance": lambda row: (row.acceptance is None, row.acceptance or 0.0, row.id),
    "tokens/s": lambda row: (-(row.output_tokens_per_s or 0.0), row.id),
    "silence": lambda row: (-row.silent_s, row.id),
}


def chosen(of: Iterable[Row], words: str, sort: str) -> list[Row]:
    wanted = words.lower().split()
    found = [row for row in of if all(word in f"{row.id} {row.role} {row.state}".lower() for word in wanted)]
    return sorted(found, key=SORTS[sort])  # type: ignore[arg-type]


def sides(of: Sequence[Row]) -> Iterator[str]:
    for name in SIDES:
        if mine := [row for row in of if row.role == name]:
            ready = sum(row.state == "ready" for row in mine)
            running, waiting = sum(row.running for row in mine), sum(row.waiting for row in mine)
            line = f"{name:<8}{ready:>4} of {len(mine):<4} run {running:<5} wait {waiting:<5}"
            if kept := [row.kept for row in mine if row.kept is not None]:
                images, mib = sum(one.images for one in kept), sum(one.mib for one in kept)
                tokens_s = sum(row.prefill_tokens_per_s or 0.0 for row in mine)
                yield f"{line} {images:,} images, {mib:,.0f} MiB {tokens_s:,.0f} tok/s"
                continue
            kv, accepted = _mean(row.kv_usage for row in mine), _mean(row.acceptance for row in mine)
            tokens_s = sum(row.output_tokens_per_s or 0.0 for row in mine)
            yield f"{line} KV {share(kv):<5} acc {share(accepted):<5} {tokens_s:,.0f} tok/s"


def forming(workers: Iterable[pb.WorkerStatus]) -> str:
    """Describe the gangs that are not ready, at most `SHOWN_GANGS` of them."""
    found = [one.words for one in gangs_of(workers).values() if one.state != "ready"]
    more = len(found) - SHOWN_GANGS
    return "; ".join(found[:SHOWN_GANGS]) + (f" and {more} more" if more > 0 else "")


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def changes(before: pb.Description, now: pb.Description) -> Iterator[str]:
    """Yield the routers that came or went, and whether the store went down or is back."""
    was, there = ({one.router_id for one in each.routers} for each in (before, now))
    yield from (f"{name}: new" for name in sorted(there - was))
    yield from (f"{name}: gone" for name in sorted(was - there))
    if now.store_problem and not before.store_problem:
        yield f"the store is down: {now.store_problem}"
    if before.store_problem and not now.store_problem:
        yield "the store is back"


def traffic(now: Seen, before: Seen | None) -> Traffic:
    """Return the routers' work since `before`; a new router counts from its second description."""
    old = {} if before is None else {one.router_id: one.load for one in before.description.routers}
    routers = [(one.load, old[one.router_id]) for one in now.description.routers if one.router_id in old]
    new = summed(increase(load, was) for load, was in routers)
    passed_s = max(1e-9, now.at - before.at) if before else 1.0
    return Traffic(
        requests_s=new.over / passed_s,
        tokens_s=new.output_tokens / passed_s,
        waiting=sum(one.load.waiting for one in now.description.routers),
        ttft=_quantiles(new.first_token),
        itl=_quantiles(new.gap),
    )


def _mean(of: Iterable[float | None]) -> float | None:
    known = [value for value in of if value is not None]
    return sum(known) / len(known) if known else None


def _quantiles(counts: Sequence[int]) -> tuple[float, float] | None:
    if len(counts) != len(SECONDS) + 1:  # no router, or routers of another version
        return None
    half, most = quantile(counts, SECONDS, 0.5), quantile(counts, SECONDS, 0.99)
    return None if half is None or most is None else (half, most)
