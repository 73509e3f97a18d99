"""Grammars that cost compilers or the engine's steps as much as possible, and harmless ones.

Each is a field of StructuredOutputsParams and its value. Some are larger than a router would accept.
"""

import json


def _json(schema):
    return "json", json.dumps(schema)


def _object(properties, **more):
    return _json({"type": "object", "properties": properties, **more})


def _recursive(name, properties):
    """Return a schema of objects that refer to their own definition."""
    definition = {"type": "object", "properties": properties, "required": [*properties]}
    return _json({"$ref": f"#/$defs/{name}", "$defs": {name: definition}})


def _nested(depth):
    if not depth:
        return {"type": "string", "maxLength": 100}
    branches = [
        {"type": "object", "properties": {f"k{i}": _nested(depth - 1), "z": {"maxLength": 50 * depth + i}}}
        for i in range(3)
    ]
    return {"oneOf": branches}


def _chain(length):
    links = {
        f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["n"]}
        for i in range(length)
    }
    links[f"d{length}"] = {"type": "string"}
    return _json({"$ref": "#/$defs/d0", "$defs": links})


def _tools(number, parameters, **bounds):
    def tool(name):
        properties = {f"p{i}": {"type": "string", **bounds} for i in range(parameters)}
        return {
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": {"type": "object", "properties": properties},
            },
            "required": ["name", "parameters"],
        }

    items = {"type": "object", "anyOf": [tool(f"tool{i}") for i in range(number)]}
    return _json({"type": "array", "minItems": 1, "items": items})


def _tags(number, triggers):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5)}}
    tags = [{"begin": f"<f{i}>", "schema": schema, "end": f"</f{i}>"} for i in range(number)]
    return "structural_tag", json.dumps({"structures": tags, "triggers": triggers})


_ALTERNATIVES = "|".join(f"([a-z]{{1,{200 + i}}}[0-9]{{1,{300 + i}}}x{i})" for i in range(110))
_DEEP = "\n".join(f'r{i} ::= "(" r{i + 1} ")" | r{i + 1} r{i + 1}' for i in range(60))
_UNSUPPORTED = {"m": {"type": "integer", "multipleOf": 3}}  # xgrammar refuses it, guidance takes it

BOMBS = {
    "1,000 strings with maxLength": _object(
        {f"p{i}": {"type": "string", "maxLength": 1000 + i} for i in range(1000)}
    ),
    "a regex of 3.3 KB": ("regex", f"({_ALTERNATIVES})*"),
    "oneOf six deep": _json(_nested(6)),
    "patternProperties": _json(
        {"type": "object", "patternProperties": {"^([a-z]{1,300}x|[a-y]{1,300})*$": {}}}
    ),
    "enum of 100,000": _json({"enum": [f"v{i}" for i in range(100_000)]}),
    "maxItems of 10^9": ("json", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000000}'),
    "minItems of 10^9": ("json", '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000000}'),
    "maxLength of 10^9": ("json", '{"type": "string", "maxLength": 1000000000}'),
    "minLength of 10^9": ("json", '{"type": "string", "minLength": 1000000000}'),
    "a chain of 2,000 references": _chain(2000),
    "three quantifiers": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "two quantifiers": ("regex", "(a{1,1000}){1,1000}"),
    "optional letters": ("regex", "(a?){3000}a{3000}"),
    "unicode classes": ("regex", "[\\w\\s\u00e9-\U0010ffff]{1,2000}"),
    "an ambiguous grammar": ("grammar", 'root ::= e\ne ::= e e | e e e | "a" | "b" | ""'),
    "ambiguous expressions": ("grammar", 'root ::= e\ne ::= e "+" e | e "*" e | [a-z]+ | e e | [a-z ]*'),
    "deep recursion": ("grammar", f'root ::= r0\n{_DEEP}\nr60 ::= "x"'),
    "2,000 optional rules": ("grammar", f"root ::= {' '.join(['a?'] * 2000)}\na ::= [a-z]"),
    "100,000 choices": ("choice", [f"choice {i}" for i in range(100_000)]),
    "200 tools": _tools(200, 20, maxLength=100),
    "300 tags and triggers": _tags(300, [f"<f{i}>" for i in range(300)]),
    "guidance: minItems of 10^9": _object(
        {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, **_UNSUPPORTED}
    ),
    "guidance: a chain of references": (
        "json",
        _chain(2000)[1].replace('{"type": "string"}', '{"type": "integer", "multipleOf": 3}'),
    ),
    "outlines: long strings": _object(
        {"a": {"type": "string", "maxLength": 2000}},
        patternProperties={"^b": {"type": "string"}},
        required=["a"],
    ),
}

# Grammars that no answer satisfies.
EMPTY = {
    "a rule that is itself": ("grammar", "root ::= root"),
    "a class of nothing": ("regex", "[^\\s\\S]"),
    "a reference without an end": _recursive("a", {"n": {"$ref": "#/$defs/a"}}),
    "a reference to itself": ("json", '{"$ref": "#"}'),
}

HONEST = {
    "a small schema": _object({"a": {"type": "integer"}, "b": {"type": "string"}}, required=["a", "b"]),
    "40 properties": _object({f"p{i}": {"type": ("string", "integer")[i % 2]} for i in range(40)}),
    "300 properties in 10 objects": _object(
        {
            f"o{j}": {
                "type": "object",
                "properties": {f"p{i}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for i in range(30)},
            }
            for j in range(10)
        }
    ),
    "a list": ("json", '{"type": "array", "items": {"type": "number"}, "maxItems": 50}'),
    "a recursive schema": _recursive("t", {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}),
    "a grammar that goes on until max_tokens": ("grammar", 'root ::= "(" root ")" | [a-z]+ "+" root'),
    "three choices": ("choice", ["yes", "no", "perhaps"]),
    "1,000 choices": ("choice", [f"choice {i}" for i in range(1000)]),
    "a date": ("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "any JSON": ("json_object", True),
    "arithmetic": ("grammar", 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "ten tools": _tools(10, 6),
    "tags": _tags(5, ["<f"]),
    "guidance: a multiple": _object(_UNSUPPORTED),
}
