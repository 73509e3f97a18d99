"""Word lists and a toy grammar that makes plain English sentences out of them."""

from __future__ import annotations

from random import Random

FIRST_NAMES = tuple(
    "Alice Bob Carol David Emma Frank Grace Henry Isla Jack Kate Leo Mia Noah Olivia Peter Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Hannah Ivan Julia Karl Lena Marco Nina Oscar Paula "
    "Ravi Sofia Tom Maya Omar Lucy Adam Sara Hugo".split()
)
LAST_NAMES = tuple(
    "Smith Jones Brown Taylor Wilson Evans Walker Wright Green Hall Wood Clark Lewis Young King Hill Scott Baker Adams "
    "Carter Parker Cook Bell Cooper Reed Ward Gray Price Long Ross Foster Silva Novak Meyer Rossi Tanaka Kim Patel".split()
)
CITIES = tuple(
    "Paris London Berlin Rome Madrid Vienna Lisbon Dublin Oslo Prague Tokyo Cairo Boston Chicago Denver Seattle Austin "
    "Toronto Sydney Delhi Lima Athens Warsaw Milan Munich Lyon Bristol Geneva Nairobi Seoul".split()
)
ANIMALS = tuple(
    "cat dog fox rabbit bear owl mouse horse tiger lion duck frog turtle sheep goat wolf deer crow whale dolphin "
    "penguin squirrel hedgehog donkey elephant monkey bee ant snail dragon".split()
)
FRUIT = tuple("apples pears plums oranges lemons grapes cherries peaches bananas berries".split())
THINGS = tuple(
    "book lamp table chair clock cup key letter map box bag coin hat coat boat train kite ball drum bell candle mirror "
    "basket pencil ladder wheel window door garden bridge river stone tree flower road house castle lantern camera "
    "piano bicycle blanket bottle button carpet feather ring rope saddle spoon shovel".split()
)
COUNTABLE = (
    tuple(
        "books pens cups keys letters coins hats boxes stamps marbles cards toys shells stones flowers eggs cookies tickets "
        "balloons pencils".split()
    )
    + FRUIT
)
ADJECTIVES = tuple(
    "small big old young red blue green quiet bright dark happy sad brave clever kind gentle tired hungry warm cold soft "
    "hard quick slow golden silver strange lovely broken empty heavy light tall short wise lonely proud shy".split()
)
PLACES = (
    "in the garden",
    "by the river",
    "near the old bridge",
    "at the market",
    "in the forest",
    "on the hill",
    "under the tree",
    "behind the house",
    "on the beach",
    "in the kitchen",
    "at the station",
    "in the library",
    "at school",
    "in the city",
    "on a small island",
    "in the mountains",
    "at the park",
    "by the sea",
)
TIMES = (
    "in the morning",
    "at noon",
    "in the evening",
    "late at night",
    "yesterday",
    "last week",
    "on Monday",
    "on Friday",
    "in spring",
    "in winter",
    "before dinner",
    "after school",
    "every day",
    "on Sunday",
    "this morning",
    "last summer",
)
VERBS_TRANSITIVE = tuple(
    "found lost saw carried painted opened closed wanted liked bought sold moved cleaned fixed forgot remembered "
    "watched took brought hid kept needed".split()
)
VERBS_INTRANSITIVE = tuple(
    "slept laughed waited sang danced rested walked ran smiled worked played listened".split()
)
COLOURS = tuple("red blue green yellow orange purple black white brown pink grey".split())
JOBS = tuple(
    "teacher doctor farmer baker painter pilot nurse writer driver gardener singer carpenter student engineer lawyer "
    "chef sailor scientist librarian tailor".split()
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
TOPICS = tuple(
    "music gardening cooking swimming friendship winter summer rain space history chess reading travel photography "
    "sleep exercise painting the ocean computers bread birds mountains trains languages mathematics money tea coffee "
    "football school honesty patience courage kindness science art weather energy water trees cats dogs".replace(
        "the ocean", "the_ocean"
    ).split()
)

_SYLLABLES = tuple(
    "ba be bi bo da de do fa fi ga go ka ke ko la le li lo lu ma me mi mo na ne no pa pe ra re ri ro sa se so ta te ti "
    "to va ve vi za zo zu nor tan lis mer gal ven dor".split()
)

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
)


def made_up_word(rng: Random) -> str:
    """Make up a pronounceable word that is in no list, so that it must be copied, not recalled."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def topic(rng: Random) -> str:
    if rng.random() < 0.25:
        return rng.choice(THINGS + ANIMALS) + "s"
    return rng.choice(TOPICS).replace("_", " ")


def full_name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def join_words(words: list[str]) -> str:
    """Join words as `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def noun_phrase(rng: Random) -> str:
    noun = rng.choice(THINGS + ANIMALS)
    if rng.random() < 0.6:
        noun = f"{rng.choice(ADJECTIVES)} {noun}"
    return f"the {noun}" if rng.random() < 0.6 else article(noun)


def sentence(rng: Random) -> str:
    """Make a plain sentence, such as `The clever fox found a golden key by the river`."""
    who = (
        rng.choice(FIRST_NAMES)
        if rng.random() < 0.5
        else f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"
    )
    if rng.random() < 0.65:
        what = f"{rng.choice(VERBS_TRANSITIVE)} {noun_phrase(rng)}"
    else:
        what = rng.choice(VERBS_INTRANSITIVE)
    ending = rng.choice(
        (rng.choice(PLACES), rng.choice(TIMES), f"{rng.choice(PLACES)} {rng.choice(TIMES)}", "")
    )
    return capitalised(f"{who} {what} {ending}".strip() + ".")


def paragraph(rng: Random, least: int, most: int) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(least, most)))
