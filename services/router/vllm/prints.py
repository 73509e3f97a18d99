"""Compute the digest of an encoded request, the same for equal requests, and its shape for the log.

suspects.py recognizes repeats of a convicted request by this digest. Nothing is printed here, and these are
not the fingerprints of models or adapters.

Leans on: vllm.v1.engine.EngineCoreRequest (request_id, external_req_id, trace_headers, arrival_time,
client_index, cache_salt, priority, sampling_params), vllm.sampling_params.SamplingParams.seed.
"""

from __future__ import annotations

import hashlib

from baton.services.engine import wire
from baton.services.engine.shapes import shape_of


def digest(engine_request: bytes) -> bytes:
    """Return a digest of a request's prompt and parameters, but not of its sender or time.

    The seed is left out, because it differs between the sequences of a request.
    """
    request = wire.decode_request(engine_request)
    request.request_id = ""
    request.arrival_time = 0.0
    request.client_index = request.priority = 0
    request.cache_salt = request.external_req_id = request.trace_headers = None
    if request.sampling_params is not None:
        request.sampling_params.seed = None
    return hashlib.sha256(wire.encode_request(request)).digest()


def shape(engine_request: bytes) -> str:
    """Return which fields a request sets and how long they are."""
    return shape_of(wire.decode_request(engine_request))
