"""The base class of Baton's exceptions. Those of a package are in its `errors.py`."""


class BatonError(Exception):
    """An expected failure. Its text is one line that says what to do."""
