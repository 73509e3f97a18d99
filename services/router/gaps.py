"""Sample the time between two tokens, for one request per stream at a time: other tokens cost nothing."""

from __future__ import annotations

from typing import Any

EVERY_S = 0.25  # between two samples of a stream
PATIENCE_S = 5.0  # wait for the next output: the request may have ended or been preempted


class GapSampler:
    """When `due`, watches one request of a stream until its next output."""

    def __init__(self) -> None:
        self.due = 0.0  # time.monotonic; outputs before it need not be shown
        self.engine_s = 0.0  # the last sample
        self._watched = ""  # an attempt_id
        self._since = 0.0  # when its last output came, on the worker's clock
        self._until = 0.0

    def look(self, outputs: Any, now: float) -> str:
        """Look at one engine step's outputs. Return the attempt id of a completed sample, or ""."""
        if not self._watched:
            first = outputs.outputs[0] if outputs.outputs else None
            if first is not None and first.finish_reason is None:
                self._watched = first.request_id
                self._since = outputs.timestamp
                self._until = now + PATIENCE_S
            return ""
        found = next((one for one in outputs.outputs if one.request_id == self._watched), None)
        if found is None and now < self._until:
            return ""
        watched, self._watched = self._watched, ""
        self.due = now + EVERY_S
        if found is None or not found.new_token_ids:
            return ""
        self.engine_s = outputs.timestamp - self._since
        return watched
