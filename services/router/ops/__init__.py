"""The live page of a router: what runs now, for people who would rather look than read.

    server.py    the page's own port: its files, its feed, requests, actions
    door.py      who may look: a key of its own, and nobody's other pages
    tries.py     waits after wrong keys
    feed.py      one message for all who look, made once a tick
    fleet.py     workers as rows, with rates
    flows.py     KV that went from worker to worker
    series.py    the last quarter of an hour, a sample a second
    events.py    what changed: workers that came, left or changed their role, alarms, failovers, retries
    actions.py   drain, undrain and change of role, audited
    static/      the page itself: no build step, nothing from elsewhere

A router without somebody who looks pays for one sample a second (docs/operations.md).
"""
