"""Short Python functions on request, and small edits of given code."""

from __future__ import annotations

import re
from random import Random

from .base import TEXTS, Dialogue, pick, turn
from .words import THINGS, article

_FUNCTIONS = [(name, one["does"], one["code"]) for name, one in TEXTS["functions"].items()]
_ARGUMENTS = TEXTS["arguments"]


def _fill(code: str, name: str, arguments: list[str]) -> str:
    """Replace NAME, A and B."""
    words = dict(zip("AB", arguments, strict=True))
    return re.sub(r"(?<![^\W_])[AB](?![^\W_])", lambda slot: words[slot[0]], code.replace("NAME", name))


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _edited(ask: str, after: str) -> Dialogue:
    return turn(ask, _fenced(after))


def _new_name(rng: Random) -> str:
    """Make a function name that does not describe the function."""
    return f"{pick(rng, 'prefixes')}_{rng.choice(THINGS)}"


def write_function(rng: Random) -> Dialogue:
    usual, does, code = rng.choice(_FUNCTIONS)
    named = rng.random() < 0.35
    name = f"{pick(rng, 'prefixes')}_{rng.choice((usual, rng.choice(THINGS)))}" if named else usual
    ask = pick(rng, "write_function", d=does)
    if named:
        ask += rng.choice((f", called {name}", f" and name it {name}"))
    ask += rng.choice((".", "", "?", ".") if ask.startswith("Can") else (".", ".", ""))
    block = _fenced(_fill(code, name, rng.choice(_ARGUMENTS[:5]) if named else _ARGUMENTS[0]))
    if rng.random() < 0.5:
        block = f"Here is a function that {does}:\n\n{block}"
    return turn(ask, block)


def explain_function(rng: Random) -> Dialogue:
    usual, does, code = rng.choice(_FUNCTIONS)
    text = _fill(code, usual, rng.choice(_ARGUMENTS))
    return turn(pick(rng, "explain_function", c=text), f"This function {does}.")


def rename(rng: Random) -> Dialogue:
    usual, _, code = rng.choice(_FUNCTIONS)
    name = _new_name(rng)
    arguments = rng.choice(_ARGUMENTS)
    before, after = _fill(code, usual, arguments), _fill(code, name, arguments)
    return _edited(pick(rng, "rename", o=usual, n=name, c=_fenced(before)), after)


def rename_argument(rng: Random) -> Dialogue:
    usual, _, code = rng.choice([f for f in _FUNCTIONS if "(A" in f[2]])
    old, new = rng.sample(_ARGUMENTS, 2)
    before, after = _fill(code, usual, old), _fill(code, usual, [new[0], old[1]])
    return _edited(pick(rng, "rename_argument", o=old[0], n=new[0], c=_fenced(before)), after)


def add_docstring(rng: Random) -> Dialogue:
    usual, does, code = rng.choice(_FUNCTIONS)
    before = _fill(code, usual, rng.choice(_ARGUMENTS))
    head, body = before.split("\n", 1)
    first, rest = does.split(" ", 1)
    after = f'{head}\n    """{first.removesuffix("s").capitalize()} {rest}."""\n{body}'
    return turn(pick(rng, "add_docstring", c=_fenced(before)), _fenced(after))


def change_constant(rng: Random) -> Dialogue:
    names = rng.sample(THINGS, rng.randint(2, 4))
    lines = [f"{name} = {rng.randint(0, 200)}" for name in names]
    index, new = rng.randrange(len(names)), rng.randint(0, 200)
    ask = pick(rng, "change_constant", n=names[index], v=new, c=_fenced("\n".join(lines)))
    lines[index] = f"{names[index]} = {new}"
    return _edited(ask, "\n".join(lines))


def write_class(rng: Random) -> Dialogue:
    noun = rng.choice(THINGS)
    fields = rng.sample(TEXTS["fields"], rng.randint(1, 3))
    start = f"def __init__(self, {', '.join(fields)}):"
    lines = [f"class {noun.capitalize()}:", f"    {start}", *(f"        self.{f} = {f}" for f in fields)]
    ask = pick(rng, "write_class", a=article(noun), n=noun.capitalize(), f=", ".join(fields))
    return turn(ask, _fenced("\n".join(lines)))


def print_loop(rng: Random) -> Dialogue:
    count, word = rng.randint(2, 100), rng.choice(THINGS)
    return _edited(pick(rng, "print_loop", w=word, n=count), f'for i in range({count}):\n    print("{word}")')


def edit_file(rng: Random) -> Dialogue:
    """Rename or remove one of several functions in a file."""
    functions: dict[str, str] = {}
    for _ in range(rng.randint(2, 5)):
        name, _, code = rng.choice(_FUNCTIONS)
        filled = _fill(code, name, rng.choice(_ARGUMENTS))
        functions.setdefault(name, filled)
    before = "\n\n\n".join(functions.values())
    name = list(functions)[rng.randrange(len(functions))]
    if len(functions) > 1 and rng.random() < 0.3:
        after = "\n\n\n".join(code for one, code in functions.items() if one != name)
        return _edited(pick(rng, "remove_function", o=name, c=_fenced(before)), after)
    fresh = _new_name(rng)
    after = before.replace(f"def {name}(", f"def {fresh}(")
    return _edited(pick(rng, "edit_file", o=name, n=fresh, c=_fenced(before)), after)
