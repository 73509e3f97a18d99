from baton.services.router.record import AttemptRecord, Record
from baton.services.router.timeline import Stage
from baton.services.router.timings import Event, Process
from baton.services.trace_context import begin


def record(request_id="r-1", *, workers=("p", "d"), moved=0, outcome="stop", troubles=()):
    """Return the record of a request that took 100 ms; a failed attempt for each of `troubles`."""
    attempts = tuple(
        AttemptRecord(number, *workers, 0.0, trouble)
        for number, trouble in enumerate((*troubles, ""), 1)
        if workers
    )
    handoff = Stage("handoff", 10.05, 10.06, Process("baton-router", ""), 1, "", {"bytes": moved})
    about = {"tenant": "acme", "service": "interactive", "model": "m", "status": 200, "streams": True}
    times = {"arrived": 10.0, "ended": 10.1, "first_token_s": 0.05, "client_s": 0.0, "clock_s": 1_000_000.0}
    tokens = {"prompt_tokens": 10, "output_tokens": 5, "drafted_tokens": 4, "accepted_tokens": 3}
    return Record(
        **about,
        **times,
        **tokens,
        request_id=request_id,
        response_id=f"cmpl-{request_id}",
        trace=begin([], 0.0),
        outcome=outcome,
        method="mtp",
        draft_steps=2,
        retried=bool(troubles),
        attempts=attempts,
        to_first_token=(Stage("queue", 10.0, 10.05, Process("baton-prefill", "p"), 1),),
        later=(handoff,) if moved else (),
        events=tuple(
            Event("failed", 10.02, number, {"trouble": trouble, "message": f"worker d: {trouble}"})
            for number, trouble in enumerate(troubles, 1)
        ),
    )
