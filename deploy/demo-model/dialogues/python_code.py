"""Short Python functions on request, and small edits of given code."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn
from .lexicon import THINGS, article

# What the function does, and its code with NAME, A and B left open.
_FUNCTIONS = (
    ("adds two numbers", "add", "def NAME(A, B):\n    return A + B"),
    ("multiplies two numbers", "multiply", "def NAME(A, B):\n    return A * B"),
    ("subtracts one number from another", "subtract", "def NAME(A, B):\n    return A - B"),
    ("squares a number", "square", "def NAME(A):\n    return A * A"),
    ("checks whether a number is even", "is_even", "def NAME(A):\n    return A % 2 == 0"),
    ("checks whether a number is odd", "is_odd", "def NAME(A):\n    return A % 2 == 1"),
    (
        "returns the larger of two numbers",
        "larger",
        "def NAME(A, B):\n    if A > B:\n        return A\n    return B",
    ),
    (
        "returns the smaller of two numbers",
        "smaller",
        "def NAME(A, B):\n    if A < B:\n        return A\n    return B",
    ),
    (
        "computes the factorial of a number",
        "factorial",
        "def NAME(A):\n    result = 1\n    for B in range(2, A + 1):\n        result *= B\n    return result",
    ),
    (
        "returns the first n Fibonacci numbers",
        "fibonacci",
        "def NAME(n):\n    A, B = 0, 1\n    numbers = []\n    for _ in range(n):\n        numbers.append(A)\n        A, B = B, A + B\n    return numbers",
    ),
    ("reverses a string", "reverse", "def NAME(A):\n    return A[::-1]"),
    ("checks whether a string is a palindrome", "is_palindrome", "def NAME(A):\n    return A == A[::-1]"),
    (
        "counts the vowels in a string",
        "count_vowels",
        'def NAME(A):\n    return sum(1 for B in A if B in "aeiou")',
    ),
    ("counts the words in a text", "count_words", "def NAME(A):\n    return len(A.split())"),
    (
        "sums a list of numbers",
        "total",
        "def NAME(A):\n    result = 0\n    for B in A:\n        result += B\n    return result",
    ),
    (
        "finds the largest number in a list",
        "find_max",
        "def NAME(A):\n    best = A[0]\n    for B in A:\n        if B > best:\n            best = B\n    return best",
    ),
    (
        "finds the smallest number in a list",
        "find_min",
        "def NAME(A):\n    best = A[0]\n    for B in A:\n        if B < best:\n            best = B\n    return best",
    ),
    ("computes the average of a list", "average", "def NAME(A):\n    return sum(A) / len(A)"),
    (
        "removes duplicates from a list",
        "unique",
        "def NAME(A):\n    result = []\n    for B in A:\n        if B not in result:\n            result.append(B)\n    return result",
    ),
    ("sorts a list", "sort_list", "def NAME(A):\n    return sorted(A)"),
    ("greets a person by name", "greet", 'def NAME(A):\n    return f"Hello, {A}!"'),
    ("prints hello world", "hello", 'def NAME():\n    print("Hello, world!")'),
    (
        "checks whether a number is prime",
        "is_prime",
        "def NAME(A):\n    if A < 2:\n        return False\n    for B in range(2, int(A ** 0.5) + 1):\n        if A % B == 0:\n            return False\n    return True",
    ),
    ("converts Celsius to Fahrenheit", "to_fahrenheit", "def NAME(A):\n    return A * 9 / 5 + 32"),
    (
        "reads a file and returns its text",
        "read_text",
        "def NAME(A):\n    with open(A) as B:\n        return B.read()",
    ),
    (
        "counts how often each item occurs",
        "count_items",
        "def NAME(A):\n    counts = {}\n    for B in A:\n        counts[B] = counts.get(B, 0) + 1\n    return counts",
    ),
    ("returns the squares of a list of numbers", "squares", "def NAME(A):\n    return [B * B for B in A]"),
    (
        "keeps only the even numbers of a list",
        "keep_even",
        "def NAME(A):\n    return [B for B in A if B % 2 == 0]",
    ),
    (
        "finds the greatest common divisor of two numbers",
        "gcd",
        "def NAME(A, B):\n    while B:\n        A, B = B, A % B\n    return A",
    ),
    (
        "searches a sorted list with binary search",
        "binary_search",
        "def NAME(A, B):\n    low, high = 0, len(A) - 1\n    while low <= high:\n        middle = (low + high) // 2\n        if A[middle] == B:\n            return middle\n        if A[middle] < B:\n            low = middle + 1\n        else:\n            high = middle - 1\n    return -1",
    ),
)
_ARGUMENTS = (
    ("a", "b"),
    ("x", "y"),
    ("first", "second"),
    ("left", "right"),
    ("value", "other"),
    ("items", "item"),
    ("data", "part"),
)
_PREFIXES = ("compute", "my", "get", "do", "make")


def _fill(code: str, name: str, arguments: tuple[str, str]) -> str:
    text = code.replace("NAME", name)
    for slot, word in zip("AB", arguments, strict=True):
        text = "".join(
            word if c == slot and not (text[i - 1].isalnum() or text[i + 1 : i + 2].isalnum()) else c
            for i, c in enumerate(text)
        )
    return text


def new_name(rng: Random) -> str:
    """Make a function name that tells nothing about the function."""
    return f"{rng.choice(_PREFIXES)}_{rng.choice(THINGS)}"


def a_function(rng: Random) -> tuple[str, str, str]:
    """Return a description of a function, its name and its code."""
    does, name, code = rng.choice(_FUNCTIONS)
    return does, name, _fill(code, name, rng.choice(_ARGUMENTS))


@generator("code", 5.0)
def write_function(rng: Random) -> Dialogue:
    does, usual, code = rng.choice(_FUNCTIONS)
    named = rng.random() < 0.35
    name = f"{rng.choice(_PREFIXES)}_{rng.choice((usual, rng.choice(THINGS)))}" if named else usual
    ask = rng.choice(
        (
            "Write a Python function that {d}",
            "Write a function that {d}",
            "Give me Python code that {d}",
            "I need a Python function that {d}",
            "Can you write a function in Python that {d}",
            "Implement a function that {d} in Python",
            "Show me a Python function that {d}",
            "Code a function that {d}",
        )
    ).format(d=does)
    if named:
        ask += rng.choice((f", called {name}", f" and name it {name}"))
    ask += rng.choice((".", "", "?", ".") if ask.startswith("Can") else (".", ".", ""))
    block = f"```python\n{_fill(code, name, rng.choice(_ARGUMENTS[:5]) if named else _ARGUMENTS[0])}\n```"
    if rng.random() < 0.5:
        block = f"Here is a function that {does}:\n\n{block}"
    return turn(ask, block, f"def {name}(")


@generator("code", 1.5)
def explain_function(rng: Random) -> Dialogue:
    does, usual, code = rng.choice(_FUNCTIONS)
    text = _fill(code, usual, rng.choice(_ARGUMENTS))
    ask = rng.choice(
        (
            "What does this code do?\n{c}",
            "Explain this function:\n```python\n{c}\n```",
            "Describe what this does:\n\n{c}",
        )
    )
    return turn(ask.format(c=text), f"This function {does}.", does)


def fenced(code: str) -> str:
    """Return the code as a Markdown block."""
    return f"```python\n{code}\n```"


@generator("edits", 3.0)
def rename(rng: Random) -> Dialogue:
    _, usual, code = rng.choice(_FUNCTIONS)
    name = new_name(rng)
    arguments = rng.choice(_ARGUMENTS)
    before, after = _fill(code, usual, arguments), _fill(code, name, arguments)
    ask = rng.choice(
        (
            "Rename the function {o} to {n}:\n{c}",
            "Change the name {o} to {n} in this code:\n{c}",
            "{c}\nRename {o} to {n}.",
        )
    )
    return turn(ask.format(o=usual, n=name, c=fenced(before)), fenced(after), after)


@generator("edits", 2.0)
def rename_argument(rng: Random) -> Dialogue:
    _, usual, code = rng.choice([f for f in _FUNCTIONS if "(A" in f[2]])
    old, new = rng.sample(_ARGUMENTS, 2)
    before, after = _fill(code, usual, old), _fill(code, usual, (new[0], old[1]))
    ask = rng.choice(("Rename the argument {o} to {n}:\n{c}", "Replace the variable {o} with {n}.\n{c}"))
    return turn(ask.format(o=old[0], n=new[0], c=fenced(before)), fenced(after), after)


@generator("edits", 2.0)
def add_docstring(rng: Random) -> Dialogue:
    does, usual, code = rng.choice(_FUNCTIONS)
    before = _fill(code, usual, rng.choice(_ARGUMENTS))
    head, body = before.split("\n", 1)
    first, rest = does.split(" ", 1)
    after = f'{head}\n    """{first.removesuffix("s").capitalize()} {rest}."""\n{body}'
    ask = rng.choice(
        ("Add a docstring to this function:\n{c}", "Document this function.\n{c}", "{c}\nAdd a docstring.")
    )
    return turn(ask.format(c=fenced(before)), fenced(after), f'{head}\n    """')


@generator("edits", 1.5)
def change_constant(rng: Random) -> Dialogue:
    names = rng.sample(THINGS, rng.randint(2, 4))
    values = [rng.randint(0, 200) for _ in names]
    index, new = rng.randrange(len(names)), rng.randint(0, 200)
    before = "\n".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))
    values[index] = new
    after = "\n".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))
    ask = rng.choice(("Set {n} to {v} in this code:\n{c}", "Change the value of {n} to {v}.\n{c}"))
    return turn(ask.format(n=names[index], v=new, c=fenced(before)), fenced(after), after)


@generator("code", 1.0)
def write_class(rng: Random) -> Dialogue:
    noun = rng.choice(THINGS)
    fields = rng.sample(("name", "size", "color", "price", "age", "weight", "owner"), rng.randint(1, 3))
    lines = [
        f"class {noun.capitalize()}:",
        f"    def __init__(self, {', '.join(fields)}):",
        *(f"        self.{f} = {f}" for f in fields),
    ]
    ask = rng.choice(
        (
            "Write a Python class for {a} with {f}.",
            "Create a class {n} with the fields {f}.",
            "Write a class that describes {a} with {f}.",
        )
    )
    return turn(
        ask.format(a=article(noun), n=noun.capitalize(), f=", ".join(fields)),
        fenced("\n".join(lines)),
        lines[1].strip(),
    )


@generator("code", 1.0)
def print_loop(rng: Random) -> Dialogue:
    count, word = rng.randint(2, 100), rng.choice(THINGS)
    ask = rng.choice(
        (
            "Write a Python loop that prints {w} {n} times.",
            "Print {w} {n} times in Python.",
            "How do I print the word {w} {n} times?",
        )
    )
    code = f'for i in range({count}):\n    print("{word}")'
    return turn(ask.format(w=word, n=count), fenced(code), code)
