"""The live page of a router: what is running now.

    server.py    the page's own port: static files, feed, requests, actions
    access.py    a key, a wait after wrong ones, no requests from other sites' pages
    feed.py      one message for all watchers, encoded once per tick
    flows.py     KV moved between workers
    series.py    the last quarter of an hour, one sample per second
    events.py    recent changes: workers, roles, alarms, failovers, retries
    actions.py   operators' actions, with an audit log
    static/      the page itself: no build step, nothing loaded from elsewhere

services/overview has the workers' rows, their changes and the actions themselves.
While nobody watches, it costs the router one sample per second (docs/operations.md).
"""
