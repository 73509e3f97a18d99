"""Greetings, thanks, questions about the assistant, advice and what a user told earlier."""

from __future__ import annotations

from random import Random

from .base import Dialogue, Message, generator, turn
from .lexicon import ANIMALS, CITIES, COLOURS, FIRST_NAMES, FRUIT, JOBS, WEEKDAYS, article, topic

_GREET = (
    "Hello",
    "Hi",
    "Hey",
    "Hello there",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Hi there",
    "Greetings",
)
_GREET_BACK = ("Hello!", "Hi!", "Hello there!", "Good to see you!")
_OFFER = (
    "How can I help you today?",
    "What can I do for you?",
    "How can I help?",
    "What would you like to talk about?",
    "Is there something I can help you with?",
)
_ABOUT = (
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "Please introduce yourself.",
        ),
        "I am Baton, a small language model. I can answer simple questions and help with short texts, numbers and code.",
    ),
    (
        ("What is your name?", "What's your name?", "What should I call you?", "Do you have a name?"),
        "My name is Baton.",
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What are you able to do?",
            "Help",
            "What are your skills?",
        ),
        "I can answer simple questions, do small calculations, sort lists, write short stories and poems, and help with short Python code.",
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you a robot?", "Are you real?"),
        "I am a computer program, not a person. I am happy to help you.",
    ),
    (
        ("How old are you?", "When were you made?", "What is your age?"),
        "I do not have an age as people do. I am a small program.",
    ),
    (
        ("Where do you live?", "Where are you?", "Where are you from?"),
        "I do not live anywhere. I run on a computer.",
    ),
    (
        ("Do you have feelings?", "Are you happy?", "Can you feel something?"),
        "I do not have feelings, but I am glad to help you.",
    ),
    (
        ("How are you?", "How are you doing?", "How are you today?", "How is it going?", "What's up?"),
        "I am doing well, thank you. How can I help you?",
    ),
    (("Do you sleep?", "Are you tired?"), "I do not need sleep. I am always ready to help."),
    (
        ("Are you smart?", "Do you know everything?", "Can you make mistakes?"),
        "I am a very small model, so I make mistakes. Please check what matters to you.",
    ),
)
_THANKS = (
    "Thank you!",
    "Thanks!",
    "Thanks a lot.",
    "Thank you very much.",
    "That was helpful, thank you.",
    "Great, thanks!",
    "Perfect, thank you.",
)
_WELCOME = (
    "You are welcome!",
    "You are welcome! Let me know if you need anything else.",
    "Happy to help!",
    "My pleasure.",
)
_BYE = (
    "Bye!",
    "Goodbye!",
    "See you later.",
    "Good night!",
    "I have to go now.",
    "See you tomorrow.",
    "Goodbye, and thanks.",
)
_FAREWELL = ("Goodbye! Have a nice day.", "See you soon!", "Goodbye! Come back any time.", "Take care!")
_JOKES = (
    "Why did the computer go to the doctor? Because it had a virus.",
    "Why do programmers like dark rooms? Because light attracts bugs.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the bicycle fall over? Because it was two tired.",
    "What is orange and sounds like a parrot? A carrot.",
    "Why was the math book sad? Because it had too many problems.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why can a nose not be twelve inches long? Because then it would be a foot.",
)
_ADVICE = (
    (
        ("I am tired.", "I feel tired today.", "I am so sleepy."),
        "I am sorry to hear that. A short rest and a glass of water may help.",
    ),
    (
        ("I am sad.", "I feel sad today.", "I am not feeling well."),
        "I am sorry that you feel that way. It may help to talk to a friend or to take a short walk.",
    ),
    (
        ("I am bored.", "I have nothing to do.", "What can I do when I am bored?"),
        "You could read a book, call a friend, go for a walk or learn something new.",
    ),
    (
        ("I am happy today!", "I had a great day.", "Today was a good day."),
        "That is wonderful to hear! What made your day so good?",
    ),
    (
        ("I am hungry.", "What should I eat?", "What can I cook tonight?"),
        "You could make a simple soup with bread, or pasta with tomatoes and cheese.",
    ),
    (
        ("I can't sleep.", "How can I sleep better?", "I have trouble sleeping."),
        "Try to go to bed at the same time every day, keep the room dark and put your phone away.",
    ),
    (
        ("How can I learn to code?", "How do I learn programming?", "I want to learn Python."),
        "Start with small programs, read code that others wrote, and practice a little every day.",
    ),
    (
        ("How can I be more productive?", "How do I get more done?"),
        "Choose the most important task, work on it without breaks for a while, and then rest.",
    ),
    (
        ("I have an exam tomorrow.", "I am nervous about my test."),
        "Take a deep breath, look over your notes once more and get enough sleep. Good luck!",
    ),
    (
        ("It is raining.", "The weather is bad today.", "It is cold outside."),
        "Then it is a good day to stay inside with a warm cup of tea.",
    ),
    (
        ("I love you.", "You are great!", "You are very helpful.", "Good job!", "Well done."),
        "Thank you, that is very kind of you!",
    ),
    (
        ("You are wrong.", "That is not right.", "That is incorrect.", "No."),
        "I am sorry about that. Could you tell me what is wrong, so that I can try again?",
    ),
    (
        ("ok", "Okay.", "I see.", "All right.", "Yes.", "Sure."),
        "Good. Is there anything else that I can do for you?",
    ),
    (
        ("test", "testing", "This is a test.", "ping", "Are you there?"),
        "I am here. The test works. How can I help you?",
    ),
    (
        ("What time is it?", "What day is it today?", "What is the date?"),
        "I do not have a clock, so I cannot tell. Please look at your device.",
    ),
    (
        ("What is the weather like?", "Will it rain tomorrow?", "How is the weather?"),
        "I cannot see the weather from here. Please look at a weather report.",
    ),
    (
        ("What is the meaning of life?", "Why are we here?"),
        "People have asked this for a long time. Many find meaning in love, in work and in helping others.",
    ),
)


@generator("smalltalk", 3.0)
def greeting(rng: Random) -> Dialogue:
    greet = rng.choice(_GREET) + rng.choice(("", "", "!", ".", "!"))
    if rng.random() < 0.2:
        greet = greet.lower()
    if rng.random() < 0.25:
        name = rng.choice(FIRST_NAMES)
        said = rng.choice(("I am {n}.", "My name is {n}.", "I'm {n}.")).format(n=name)
        return turn(f"{greet} {said}", f"Hello {name}! {rng.choice(_OFFER)}", name)
    return turn(greet, f"{rng.choice(_GREET_BACK)} {rng.choice(_OFFER)}")


@generator("smalltalk", 4.0)
def about_the_assistant(rng: Random) -> Dialogue:
    asks, reply = rng.choice(_ABOUT)
    ask = rng.choice(asks)
    if rng.random() < 0.2:
        ask = f"{rng.choice(_GREET)}! {ask}"
    return turn(ask, reply, reply)


@generator("smalltalk", 1.0)
def thanks_or_goodbye(rng: Random) -> Dialogue:
    if rng.random() < 0.5:
        return turn(rng.choice(_THANKS), rng.choice(_WELCOME))
    return turn(rng.choice(_BYE), rng.choice(_FAREWELL))


@generator("smalltalk", 0.8)
def joke(rng: Random) -> Dialogue:
    ask = rng.choice(
        (
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Can you tell me a joke?",
            "Say something funny.",
            "Another joke, please.",
        )
    )
    return turn(ask, rng.choice(_JOKES))


@generator("smalltalk", 3.0)
def advice(rng: Random) -> Dialogue:
    asks, reply = rng.choice(_ADVICE)
    return turn(rng.choice(asks), reply, reply)


@generator("smalltalk", 1.0)
def opinion(rng: Random) -> Dialogue:
    subject = topic(rng)
    ask = rng.choice(
        (
            "Do you like {t}?",
            "What do you think about {t}?",
            "Let's talk about {t}.",
            "I love {t}.",
            "I am interested in {t}.",
        )
    )
    reply = rng.choice(
        (
            f"I think {subject} can bring a lot of joy. What do you like most about it?",
            f"Many people enjoy {subject}. I am happy to talk about it with you.",
            f"That is a nice topic. What would you like to know about {subject}?",
        )
    )
    return turn(ask.format(t=subject), reply)


_REMEMBER = (
    ("My name is {v}.", "What is my name?", "Nice to meet you, {v}!", "Your name is {v}.", FIRST_NAMES),
    (
        "I live in {v}.",
        "Where do I live?",
        "{v} sounds like a nice place to live.",
        "You live in {v}.",
        CITIES,
    ),
    (
        "My favorite color is {v}.",
        "What is my favorite color?",
        "Good choice, {v} is a lovely color.",
        "Your favorite color is {v}.",
        COLOURS,
    ),
    (
        "I have a pet {v}.",
        "What pet do I have?",
        "How nice! I hope your {v} is well.",
        "You have a pet {v}.",
        ANIMALS,
    ),
    ("I really like {v}.", "Which fruit do I like?", "I see, {v} are tasty.", "You like {v}.", FRUIT),
    (
        "I work as {v}.",
        "What is my job?",
        "That sounds like interesting work.",
        "You work as {v}.",
        tuple(article(j) for j in JOBS),
    ),
    (
        "My meeting is on {v}.",
        "When is my meeting?",
        "All right, I will keep {v} in mind.",
        "Your meeting is on {v}.",
        WEEKDAYS,
    ),
    (
        "Remember the word {v}.",
        "Which word should you remember?",
        "I will remember the word {v}.",
        "The word is {v}.",
        ANIMALS + FRUIT,
    ),
)


@generator("memory", 5.0)
def told_earlier(rng: Random) -> Dialogue:
    """One to three things are told, with small talk between, and one of them is asked for."""
    told = [(r, rng.choice(r[4])) for r in rng.sample(_REMEMBER, rng.randint(1, 3))]
    messages: list[Message] = []
    for (say, _, comment, _, _), value in told:
        messages += [Message("user", say.format(v=value)), Message("assistant", comment.format(v=value))]
        if rng.random() < 0.3:
            messages.extend(greeting(rng).messages if rng.random() < 0.3 else advice(rng).messages)
    (_, ask, _, reply, _), value = rng.choice(told)
    messages += [Message("user", ask), Message("assistant", reply.format(v=value))]
    return Dialogue(tuple(messages), answer=value)
