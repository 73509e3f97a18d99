"""Explanations, tips and how-to lists for any topic: fluent and general, not deep."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn
from .lexicon import capitalised, join_words, made_up_word, topic

_FIRST = (
    "{T} can mean many things, but most people think of it as a part of daily life.",
    "{T} plays a larger role in our lives than many people think.",
    "When people talk about {t}, they often mean quite different things.",
    "{T} has a long history, and people have always been interested in it.",
)
_MIDDLE = (
    "It can help people to relax and to learn something new.",
    "A good way to begin is to look at a simple example.",
    "Some people like it because it brings them together with others.",
    "It takes some time and practice, but the result is worth it.",
    "There are many books about it for readers of every age.",
    "It is useful at home, at school and at work.",
    "With a little patience, everyone can understand the main idea.",
    "It changes with the seasons and from place to place.",
)
_LAST = (
    "In short, {t} is worth a closer look.",
    "That is why {t} matters to so many people.",
    "If you want to know more about {t}, just ask.",
    "So the best way to learn about {t} is to try it yourself.",
)
_ASK = (
    "Tell me about {t}.",
    "Explain {t}.",
    "Explain {t} to me in simple words.",
    "What can you tell me about {t}?",
    "Write a short text about {t}.",
    "Write a paragraph about {t}.",
    "Why is {t} important?",
    "Why do people like {t}?",
    "Describe {t}.",
    "Give me a short introduction to {t}.",
    "Write an essay about {t}.",
    "How does {t} work?",
)


def _any_topic(rng: Random) -> str:
    return made_up_word(rng) if rng.random() < 0.15 else topic(rng)


@generator("explanations", 4.0)
def about_topic(rng: Random) -> Dialogue:
    t = _any_topic(rng)
    parts = [rng.choice(_FIRST), *rng.sample(_MIDDLE, rng.randint(1, 4)), rng.choice(_LAST)]
    text = " ".join(p.format(t=t, T=capitalised(t)) for p in parts)
    return turn(rng.choice(_ASK).format(t=t), text)


_TIPS = (
    "Start with a small step.",
    "Set aside some time every day.",
    "Ask a friend to join you.",
    "Read about it before you begin.",
    "Write down what you learn.",
    "Do not be afraid of mistakes.",
    "Take breaks when you are tired.",
    "Choose a quiet place.",
    "Look at what others do.",
    "Keep it simple.",
    "Be patient with yourself.",
    "Enjoy what you have done.",
)


@generator("explanations", 2.0)
def tips(rng: Random) -> Dialogue:
    t, count = _any_topic(rng), rng.randint(3, 5)
    ask = rng.choice(
        (
            "Give me {n} tips for {t}.",
            "What are {n} tips about {t}?",
            "List {n} ideas for {t}.",
            "How do I get better at {t}? Give me {n} tips.",
        )
    )
    lines = "\n".join(f"{i}. {tip}" for i, tip in enumerate(rng.sample(_TIPS, count), 1))
    number = rng.choice((str(count), ("", "", "", "three", "four", "five")[count]))
    return turn(ask.format(n=number, t=t), f"Here are {count} tips for {t}:\n{lines}")


_GOOD = (
    "it brings people joy",
    "it is easy to begin",
    "it can save time",
    "it keeps the mind fresh",
    "it helps people to meet",
)
_BAD = (
    "it can take a lot of time",
    "it can cost money",
    "it needs practice",
    "it is not for everyone",
    "it can be tiring",
)


@generator("explanations", 1.0)
def pros_and_cons(rng: Random) -> Dialogue:
    t = _any_topic(rng)
    ask = rng.choice(
        (
            "What are the pros and cons of {t}?",
            "Name the advantages and disadvantages of {t}.",
            "What speaks for and against {t}?",
        )
    )
    good, bad = join_words(rng.sample(_GOOD, 2)), join_words(rng.sample(_BAD, 2))
    return turn(ask.format(t=t), f"There are two sides to {t}.\nPros: {good}.\nCons: {bad}.")


_HOWTO = (
    (
        "make tea",
        (
            "Boil some water.",
            "Put the tea in a cup.",
            "Pour the water over the tea.",
            "Wait for a few minutes.",
            "Enjoy your tea.",
        ),
    ),
    (
        "bake bread",
        (
            "Mix flour, water, salt and yeast.",
            "Knead the dough for ten minutes.",
            "Let it rest for an hour.",
            "Shape a loaf.",
            "Bake it until it is brown.",
        ),
    ),
    (
        "plant a tree",
        (
            "Choose a sunny place.",
            "Dig a deep hole.",
            "Set the tree into the hole.",
            "Fill the hole with earth.",
            "Water the tree.",
        ),
    ),
    (
        "boil an egg",
        (
            "Boil some water in a pot.",
            "Put the egg into the water.",
            "Wait for about seven minutes.",
            "Cool the egg in cold water.",
        ),
    ),
    (
        "write a letter",
        (
            "Write the date at the top.",
            "Greet the reader.",
            "Say what you want to say.",
            "End with a kind word.",
            "Sign your name.",
        ),
    ),
    (
        "wash a car",
        (
            "Rinse the car with water.",
            "Wash it with soap and a sponge.",
            "Rinse it again.",
            "Dry it with a soft cloth.",
        ),
    ),
    (
        "make a salad",
        (
            "Wash the vegetables.",
            "Cut them into small pieces.",
            "Mix oil, vinegar and salt.",
            "Pour it over the salad and stir.",
        ),
    ),
    (
        "learn a language",
        (
            "Learn a few words every day.",
            "Listen to people who speak it.",
            "Read simple stories.",
            "Speak as often as you can.",
        ),
    ),
    (
        "install a Python package",
        (
            "Open a terminal.",
            "Create a virtual environment.",
            "Run pip install with the name of the package.",
            "Import the package in Python.",
        ),
    ),
    (
        "debug a program",
        (
            "Read the error message.",
            "Find the line that fails.",
            "Print the values around it.",
            "Change one thing at a time.",
            "Add a test for the bug.",
        ),
    ),
    (
        "make coffee",
        ("Grind the beans.", "Heat the water.", "Pour the water over the coffee slowly.", "Serve it hot."),
    ),
    (
        "clean a room",
        ("Open the window.", "Pick up what lies on the floor.", "Dust the shelves.", "Sweep the floor."),
    ),
)


@generator("explanations", 2.0)
def how_to(rng: Random) -> Dialogue:
    task, steps = rng.choice(_HOWTO)
    ask = rng.choice(
        (
            "How do I {t}?",
            "How can I {t}?",
            "Explain how to {t}.",
            "Tell me how to {t}, step by step.",
            "What are the steps to {t}?",
            "Give me instructions to {t}.",
        )
    )
    return turn(
        ask.format(t=task),
        f"Here is how to {task}:\n" + "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1)),
    )
