"""The root of Baton's exceptions. Each package draws its own branch at the top of one file.

BatonError
├── scheduler/errors.py: SchedulerError and below
├── handoff/errors.py:   HandoffError and below
└── services/errors.py:  ServiceError and below
"""


class BatonError(Exception):
    """What Baton raises on purpose. Its text is one clear line that says what to do."""
