"""OpenAI's batch format: the file of requests, checked as a whole, and the file of results, resumed.

In:   {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Out:  {"id": "batch_req_...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...",
      "body": {...}}, "error": null}, in the order in which requests finish

Both are read line by line; only the ids of a file are held in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from baton.services.offline.client import HttpResponse, json_object
from baton.services.offline.errors import InputError, OfflineError, RequestError
from baton.services.offline.prompts import CHAT, COMPLETIONS

SHOWN_PROBLEMS = 20
_NEEDED = {CHAT: "messages", COMPLETIONS: "prompt"}  # path -> key that a body must have
_NOT_SERVED = {"/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/images/generations"}
_KEYS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class Item:
    custom_id: str
    url: str
    body: dict[str, Any]


def check(path: Path, served: Container[str]) -> set[str]:
    """Return the custom_ids of all requests, after checking that each could be sent.

    `served` are the models' names. Raises InputError with the first SHOWN_PROBLEMS problems, by line.
    """
    lines: dict[str, int] = {}
    problems: list[str] = []
    for number, item in _items(path):
        problem = item if isinstance(item, str) else _problem(item, served)
        if not problem and not isinstance(item, str):
            first = lines.setdefault(item.custom_id, number)
            problem = "" if first == number else f"custom_id {item.custom_id!r} is also on line {first}"
        if problem:
            problems.append(f"line {number}: {problem}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        tail = [f"and {more} more"] if more > 0 else []
        raise InputError("\n  ".join([f"{path} is not a batch:", *problems[:SHOWN_PROBLEMS], *tail]))
    if not lines:
        raise InputError(f"{path} contains no request")
    return set(lines)


def read(path: Path, skip: Container[str]) -> Iterator[Item]:
    """Yield the requests of a checked file, except those whose custom_id is in `skip`."""
    for number, item in _items(path):
        if isinstance(item, str):
            raise InputError(f"{path} has changed since it was checked: line {number}: {item}")
        if item.custom_id not in skip:
            yield item


@dataclass
class Output:
    """The file of results, locked for one writer. `write` returns once its whole line is in the file."""

    path: Path
    descriptor: int
    done: set[str] = field(default_factory=set)  # custom_ids with a result from an earlier run
    failed: int = 0  # how many of these requests failed

    @classmethod
    def resume(cls, path: Path, known: Container[str]) -> Self:
        """Open the file, cut off an unfinished last line, and collect the results in it.

        Raises InputError if the file has anything but results for the ids in `known`, or another writer.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        output = cls(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            output._see(known)
        except BlockingIOError:
            output.close()
            raise InputError(f"another batch writes to {path}: wait for it, or choose another file") from None
        except BaseException:
            output.close()
            raise
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def write(self, custom_id: str, result: HttpResponse | RequestError) -> bool:
        """Append one result; return whether the request succeeded. Raises OfflineError if writing fails."""
        record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        if isinstance(result, HttpResponse):
            request_id = str(result.body.get("id") or "")
            response = {"status_code": result.status, "request_id": request_id, "body": result.body}
            record |= {"response": response, "error": None}
        else:
            record |= {"response": None, "error": {"code": "request_failed", "message": str(result)}}
        try:
            data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # an unpaired surrogate in an id or an answer, which UTF-8 cannot encode
            data = json.dumps(record).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as problem:
            raise OfflineError(f"cannot write {self.path}: {problem.strerror}") from None
        return _good(record)

    def _see(self, known: Container[str]) -> None:
        whole = 0
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # its writer was killed
                whole += len(line)
                record = json_object(line)
                custom_id = record.get("custom_id") if record else None
                if record is None or "response" not in record or custom_id not in known:
                    raise InputError(
                        f"{self.path} line {number} belongs to none of these requests: to resume another "
                        "batch, give its file of requests; to start over, remove this file"
                    )
                self.done.add(str(custom_id))
                self.failed += not _good(record)
        os.ftruncate(self.descriptor, whole)


def _good(record: dict[str, Any]) -> bool:
    response = record["response"]
    return isinstance(response, dict) and response.get("status_code") == 200


def _items(path: Path) -> Iterator[tuple[int, Item | str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _item(line)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _item(line: bytes) -> Item | str:
    record = json_object(line)
    if record is None:
        return "not a JSON object"
    missing = sorted(_KEYS - record.keys())
    if missing:
        return f"{' and '.join(missing)} missing"
    if record["method"] != "POST":
        return f"method {record['method']!r} is not POST"
    for key, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(record[key], kind):
            return f"{key} {record[key]!r} is not {'a string' if kind is str else 'a JSON object'}"
    return Item(record["custom_id"], record["url"], record["body"])


def _problem(item: Item, served: Container[str]) -> str:
    if item.url not in _NEEDED:
        known = "is not served here" if item.url in _NOT_SERVED else "is unknown"
        return f"url {item.url!r} {known}; allowed: {', '.join(_NEEDED)}"
    if _NEEDED[item.url] not in item.body:
        return f"body has no {_NEEDED[item.url]!r}"
    if item.body.get("stream"):
        return "body sets stream: a batch cannot stream"
    model = item.body.get("model")
    return "" if model is None or model in served else f"model {model!r} is not served"
