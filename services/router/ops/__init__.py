"""The live page of a router: what runs now, for people who would rather look than read.

    server.py    the page's own port: its files, its feed, requests, actions
    door.py      access: a key of its own, and no other site's pages
    tries.py     waits after wrong keys
    feed.py      one message for all watchers, made once a tick
    fleet.py     workers as rows, with rates
    flows.py     KV moved from worker to worker
    series.py    the last quarter of an hour, a sample a second
    events.py    recent changes: workers, roles, alarms, failovers, retries
    actions.py   drain, undrain and change of role, with an audit log
    static/      the page itself: no build step, nothing from elsewhere

While nobody watches, a router pays for one sample a second (docs/operations.md).
"""
