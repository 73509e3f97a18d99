"""Tell whether any finite answer satisfies a grammar: none does if a rule always refers to itself.

This works on the parsed grammar as xgrammar serializes it, in version v16, so it covers schemas, regexes and
grammars. In that format, an expression consists of its type, the number of its values, and the values.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

_VERSION = "v16"
_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8


def has_an_end(serialized: str) -> bool:
    """Return False if no finite answer satisfies the grammar, True if one does or if that is unknown."""
    grammar = json.loads(serialized)
    if grammar.get("__VERSION__") != _VERSION:
        return True
    return _Grammar(grammar).root_ends()


class _Grammar:
    def __init__(self, grammar: dict[str, Any]) -> None:
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        self._bodies: list[int] = [rule[1] for rule in grammar["rules"]]
        self._root: int = grammar["root_rule_id"]
        self._ends: set[int] = set()  # rules known to have a finite answer

    def root_ends(self) -> bool:
        users: dict[int, list[int]] = {}
        for rule, body in enumerate(self._bodies):
            for used in self._rules_in(body):
                users.setdefault(used, []).append(rule)
        waiting = deque(range(len(self._bodies)))
        while waiting:
            rule = waiting.popleft()
            if rule not in self._ends and self._can_end(self._bodies[rule]):
                self._ends.add(rule)
                waiting.extend(users.get(rule, ()))
        return self._root in self._ends

    def _expression(self, number: int) -> tuple[int, list[int]]:
        start = self._starts[number]
        kind, length = self._data[start], self._data[start + 1]
        return kind, self._data[start + 2 : start + 2 + length]

    def _rules_in(self, number: int) -> list[int]:
        found, waiting = [], [number]
        while waiting:
            one = waiting.pop()
            if one < 0:
                continue
            kind, values = self._expression(one)
            if kind in (_RULE, _REPEAT):
                found.append(values[0])
            elif kind in (_SEQUENCE, _CHOICES):
                waiting.extend(values)
        return found

    def _can_end(self, number: int) -> bool:
        if number < 0:
            return True
        kind, values = self._expression(number)
        if kind == _RULE:
            return values[0] in self._ends
        if kind == _REPEAT:
            return values[1] == 0 or values[0] in self._ends
        if kind == _SEQUENCE:
            return all(map(self._can_end, values))
        if kind == _CHOICES:
            return any(map(self._can_end, values))
        return True
