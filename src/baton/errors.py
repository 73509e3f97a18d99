"""The root of Baton's exceptions. Each package shows its own branch at the top of one file.

BatonError
├── home.py:             NoHome
├── scheduler/errors.py: SchedulerError and below
├── handoff/errors.py:   HandoffError and below
└── services/errors.py:  ServiceError and below
"""


class BatonError(Exception):
    """Report an expected failure. The text is one line that says what to do."""
