"""Find the images in a parsed request, each with its place, and refuse other media by name.

Takes the requests of chat completions, Responses, Anthropic's Messages, and /tokenize, as mappings or
objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.services.router.errors import Unsupported

_IMAGES = frozenset({"image_url", "input_image", "image"})
_AUDIO = frozenset({"audio_url", "input_audio", "audio_embeds", "audio"})
_VIDEO = frozenset({"video_url", "video_embeds", "video"})
_FILES = frozenset({"file", "input_file", "document", "container_upload"})
_EMBEDDINGS = frozenset({"image_embeds", "prompt_embeds"})
_OBJECTS = frozenset({"image_pil"})
# The keys that identify the kind of a part without a type.
MEDIA = _IMAGES | _AUDIO | _VIDEO | _FILES | _EMBEDDINGS | _OBJECTS
_WHY = {
    **dict.fromkeys(_AUDIO, "audio is not served here: send its transcript as text"),
    **dict.fromkeys(_VIDEO, "video is not served here: send some of its frames as images"),
    **dict.fromkeys(_FILES, "files are not served here: send their text, or their pages as images"),
    **dict.fromkeys(
        _EMBEDDINGS, "embeddings are not accepted from clients, as they could end an engine: send the image"
    ),
    **dict.fromkeys(_OBJECTS, "objects of Python are not accepted: send the image as a data: URL"),
}
_IN = {"messages": "content", "input": "content"}  # the fields that hold messages, and where their parts are
_OUTPUT = "output"  # parts of a tool's result, in Responses


@dataclass(frozen=True, slots=True)
class Part:
    place: str  # such as messages[2].content[1]
    url: str = field(repr=False)


def images(request: Any, *, among: Mapping[str, Any] | None = None) -> list[Part]:
    """Return the images of a request in order. `among`: further lists of messages, by their name in errors.

    Raises Unsupported for a part that is not served, naming its place.
    """
    fields = {name: _field(request, name) for name in _IN} | dict(among or {})
    found = []
    for name, messages in fields.items():
        for place, part in _in_messages(name, messages):
            if image := _image(place, part):
                found.append(image)
    return found


def _in_messages(name: str, messages: Any) -> Iterator[tuple[str, Any]]:
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        place = f"{name}[{number}]"
        if isinstance(message, list):
            yield from _in_messages(place, message)
            continue
        for key in ("content", _OUTPUT):
            yield from _in_content(f"{place}.{key}", _listed(message, key))


def _in_content(place: str, parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, part in enumerate(parts):
        if isinstance(part, str) or part is None:
            continue
        yield f"{place}[{number}]", part
        yield from _in_content(
            f"{place}[{number}].content", _listed(part, "content")
        )  # Anthropic's tool_result


def _listed(value: Any, name: str) -> list[Any]:
    """Return a field's parts. pydantic leaves some fields as one-shot iterators: replace these with lists."""
    parts = _field(value, name)
    if isinstance(parts, list):
        return parts
    if isinstance(parts, str | bytes | Mapping) or not isinstance(parts, Iterable):
        return []
    if not isinstance(value, dict):
        return []
    value[name] = kept = list(parts)
    return kept


def _image(place: str, part: Any) -> Part | None:
    kind = _field(part, "type")
    if kind is None and isinstance(part, Mapping):
        kind = next(iter(sorted(MEDIA.intersection(part))), None)
    if not isinstance(kind, str) or kind not in MEDIA:
        return None
    if why := _WHY.get(kind):
        raise Unsupported(f"{place}: a part of type {kind!r}: {why} (docs/limits.md)")
    if _field(part, "uuid") is not None:
        raise Unsupported(
            f"{place}: 'uuid' is not accepted, as it would choose the name under which the image is cached: "
            "leave it out"
        )
    return Part(place, _url(place, part, kind))


def _url(place: str, part: Any, kind: str) -> str:
    if kind == "image":
        url = _anthropics(place, _field(part, "source"))
    else:
        url = _field(part, "image_url")
        if not isinstance(url, str) and url is not None:
            url = _field(url, "url")
    if url is None and _field(part, "file_id") is not None:
        raise Unsupported(f"{place}: {_WHY['file']}")
    if not isinstance(url, str) or not url:
        raise Unsupported(f"{place}: the image has no URL: send it as a data: URL")
    return url


def _anthropics(place: str, source: Any) -> Any:
    if not isinstance(source, Mapping):
        raise Unsupported(f"{place}: the image has no 'source' with its data: see docs/images.md")
    kind = source.get("type") or "base64"
    if kind == "url":
        return source.get("url")
    if kind != "base64":
        raise Unsupported(f"{place}: an image's source is 'base64' or 'url', not {str(kind)[:40]!r}")
    declared = source.get("media_type", "image/jpeg")
    return f"data:{declared};base64,{source.get('data', '')}"


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
