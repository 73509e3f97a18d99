"""Bodies for every POST path: valid and invalid, wide, deep, long, cut and odd, up to the largest size.

Each body is drawn at random for a kind and a size. The kinds take turns, so a few dozen bodies cover all of
them.
"""

import json
import random
from dataclasses import dataclass

MODEL = "tiny"
# A valid body for each path. Generated fields are added to it, because a wholly generated body would nearly
# always fail at its first wrong field. `max_tokens` keeps answers short.
RIGHT = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 73]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/invocations": {"prompt": "Hi", "max_tokens": 2},
}
LARGEST = 8 << 20  # router.max_body_mib
PATHS = (*RIGHT, "/ping", "/v1/responses/resp_1/cancel", "/inference/v1/abort_requests")
LISTS = (
    *("messages", "input", "tools", "prompt", "stop", "bad_words", "documents", "items", "tokens"),
    *("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "label_token_ids", "system", "include"),
    *("stop_sequences", "suffix", "metadata", "unknown"),
)
TEXTS = (
    *("prompt", "prompt", "input", "model", "user", "stop", "query", "suffix", "instructions", "text"),
    *("chat_template", "system", "cache_salt", "request_id", "service_tier", "tool_choice", "priority"),
    "previous_response_id",
)
NUMBERS = ("seed", "temperature", "max_tokens", "n", "top_p", "priority", "min_p", "top_k")


@dataclass(frozen=True)
class Draw:
    """The random generator, the size and the path of one body."""

    rng: random.Random
    size: int  # approximate size in bytes
    path: str

    def right(self, **fields):
        """Return a valid body for the path, with these fields."""
        return json.dumps({"model": MODEL, **RIGHT.get(self.path, {}), **fields}).encode()

    def filled(self, item, field):
        """Return a valid body in which a field is a list that repeats one item."""
        count = max(1, self.size // (len(item) + 1))
        return _put(self.right(), field, b"[" + b",".join([item] * count) + b"]")


def _put(body, field, value):
    return body[:-1] + b', "' + field.encode() + b'": ' + value + b"}"


def _text_part(kind):
    return {"type": kind, "text": "Hello there, how are you?"}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ITEMS = (
    *({}, 0, 1.5, None, True, "a", "", [], [[]], [1, 2], {"a": {}}, {"type": "text"}, {"role": "user"}),
    {"role": "user", "content": "Hello there, how are you?"},
    {"role": "user", "content": [_text_part("text"), _text_part("text")]},
    {"role": "user", "content": [{}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"type": "message", "role": "user", "content": [_text_part("input_text")]},
    {"type": "message", "role": "user", "content": [{"type": "input_text"}, {}]},
    {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [{}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "function_call_output", "call_id": "c", "output": [{}]},
    {"type": "reasoning", "id": "r", "summary": [{}]},
    {"type": "computer_call", "action": {}},
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
    [{"role": "user", "content": "Hi"}],
)


def wide(draw):
    return draw.filled(json.dumps(draw.rng.choice(ITEMS)).encode(), draw.rng.choice(LISTS))


def natural(draw):
    """Return a body whose list has valid or nearly valid items."""
    field = {"/v1/responses": "input", "/detokenize": "tokens", "/generative_scoring": "items"}.get(draw.path)
    return draw.filled(json.dumps(draw.rng.choice(ITEMS)).encode(), field or draw.rng.choice(LISTS[:3]))


def parts(draw):
    """Return one message of many parts."""
    item = draw.rng.choice((_text_part("text"), _text_part("input_text"), {}, {"type": "refusal"}, "a", 0))
    content = draw.filled(json.dumps(item).encode(), "content")[:-1].partition(b'"content": ')[2]
    message = b'[{"type": "message", "role": "user", "content": ' + content + b"}]"
    return _put(draw.right(), "input" if draw.path == "/v1/responses" else "messages", message)


def deep(draw):
    opening, closing = draw.rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")))
    depth = draw.rng.choice((50, 150, 190, 1_000, draw.size // 7))
    body = opening * depth + b"1" + closing * depth
    return _put(draw.right(), draw.rng.choice(LISTS), body)


def long(draw):
    unit = draw.rng.choice(
        ("a", "Hello world. ", "/a", "\\", '"', "\n", "\u00e9", "\u4e2d", "\U0001f600", " ", "/home/x ", '{"')
    )
    text = json.dumps(unit, ensure_ascii=draw.rng.random() < 0.5).encode()[1:-1]
    text = b'"' + text * (draw.size // len(text)) + b'"'
    field = draw.rng.choice(TEXTS)
    if draw.rng.random() < 0.3:
        message = b'[{"role": "user", "content": ' + text + b"}]"
        return _put(draw.right(), "input" if draw.path == "/v1/responses" else "messages", message)
    if draw.rng.random() < 0.2:
        text = b"[" + text + b"]"
    body = _put(draw.right(), field, text)
    return _put(body, "truncate_prompt_tokens", b"5") if draw.rng.random() < 0.2 else body


def names(draw):
    """Return a body with many fields, at its top or in one field."""
    pairs = ",".join(f'"{number}":{draw.rng.randrange(9)}' for number in range(draw.size // 9)).encode()
    field = draw.rng.choice(("logit_bias", "metadata", "chat_template_kwargs", "structured_outputs", ""))
    if not field:
        return draw.right()[:-1] + b"," + (pairs or b'"0":0') + b"}"
    return _put(draw.right(), field, b"{" + pairs + b"}")


def twice(draw):
    return draw.right()[:-1] + b', "prompt": "Hi"' * (draw.size // 16 + 1) + b"}"


def numbers(draw):
    digits = b"1" * draw.rng.choice((5, 60, 400, 5_000, draw.size))
    forms = (digits, b"-" + digits, digits + b".5", b"1." + digits, b"1e" + digits, b"1e400", b"-1e999")
    many = b"[" + (digits[:4000] + b",") * 900 + b"1]"
    odd = (b"NaN", b"-Infinity", b"1e-400", b"9223372036854775808", many)
    return _put(draw.right(), draw.rng.choice(NUMBERS), draw.rng.choice((*forms, *odd)))


def characters(draw):
    odd = (b"\\ud83d", b"\\ude00", b"\\u0000", b"\xff\xfe", b"\xed\xa0\xbd", b"\xf0\x9f", b"\t", b"\\x")
    text = b'"Hi' + draw.rng.choice(odd) + b'"'
    field = draw.rng.choice((*TEXTS, "bad_words", "stop", "messages", draw.rng.choice(LISTS)))
    if field == "messages" or (field == "input" and draw.rng.random() < 0.5):
        role = draw.rng.choice((b'"user"', text))
        text = b'[{"role": ' + role + b', "content": ' + text + b', "name": ' + text + b"}]"
    elif draw.rng.random() < 0.5:
        text = b"[" + text + b"]"
    return _put(draw.right(), field, text)


def broken(draw):
    body = bytearray(draw.rng.choice((wide, natural, parts, long))(draw))
    how = draw.rng.randrange(6)
    if how == 0:
        return bytes(body[: draw.rng.randrange(len(body))])
    if how == 1:
        return bytes(body) + b"]" * draw.size
    if how == 2:
        return bytes(body[: 1 << 16].decode(errors="replace").encode("utf-16"))
    if how == 3:
        return draw.rng.randbytes(min(draw.size, 1 << 20))
    for _ in range(3):
        body[draw.rng.randrange(len(body))] = draw.rng.randrange(256)
    return bytes(body) if how == 4 else b" " * draw.size + bytes(body)


def history(draw):
    """Return a valid conversation like an agent's, of a few thousand messages at most."""
    count = min(2_000, max(1, draw.size // 400))
    text = "x " * min(2_000, draw.size // (2 * count))
    turns = {
        "/v1/responses": (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": text},
        ),
        "/v1/messages": (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": text}]},
        ),
        "/v1/chat": (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": text},
        ),
    }
    for path, tool in turns.items():
        if draw.path.startswith(path):
            messages = [{"role": "user", "content": text}, *tool] * (count // 2 + 1)
            field = "input" if path == "/v1/responses" else "messages"
            return draw.right(**{field: [messages] if draw.path.endswith("batch") else messages})
    return draw.right(prompt=[[5] * (draw.size // 3)] if draw.path == "/v1/completions" else text * count)


def words(draw):
    field = draw.rng.choice(("bad_words", "stop", "stop_sequences", "items"))
    count = draw.rng.choice((1, 4, 100, 128, 1_000))
    each = "word " * max(1, draw.size // (5 * count))
    return draw.right(**{field: [f"{each}{number}" for number in range(count)]})


def schema(draw):
    """Return many tools, or a tool with a large schema. Grammars have limits and tests of their own."""
    fields = min(2_000, draw.size // 60)
    large = {"type": "object", "properties": {f"f{one}": {"type": "string"} for one in range(fields)}}
    small = {"type": "object", "properties": {"a": {"type": "string"}}}
    count, kind = draw.rng.choice(((1, large), (min(3_000, draw.size // 120 + 1), small)))
    tools = [{"type": "function", "function": {"name": "f", "parameters": kind}}] * count
    if draw.path == "/v1/responses":
        tools = [{"type": "function", "name": "f", "parameters": kind}] * count
    elif draw.path.startswith("/v1/messages"):
        tools = [{"name": "f", "input_schema": kind}] * count
    return draw.right(tools=tools, tool_choice=draw.rng.choice(("auto", "none")))


KINDS = (
    *(wide, natural, parts, deep, long, names, twice, numbers, characters, broken, history, words, schema),
)


def bodies(number, seed, largest=LARGEST):
    """Yield the kind's name, path and contents of this many bodies; one in six has the largest size."""
    rng = random.Random(seed)
    for one in range(number):
        kind = KINDS[one % len(KINDS)]
        size = largest - 4_096 if rng.random() < 1 / 6 else int(1_000 * (largest / 1_000) ** rng.random())
        draw = Draw(rng, size, rng.choice(PATHS) if rng.random() < 0.15 else rng.choice(tuple(RIGHT)))
        yield kind.__name__, draw.path, kind(draw)[:largest]
