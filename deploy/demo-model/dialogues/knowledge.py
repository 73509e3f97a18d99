"""The tables behind `facts`: common knowledge only."""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """`key:value` pairs separated by semicolons."""
    return dict(tuple(part.strip().split(":", 1)) for part in text.split(";") if part.strip())  # type: ignore[misc]


CAPITALS = _pairs(
    "France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;Austria:Vienna;Ireland:Dublin;Norway:Oslo;"
    "Sweden:Stockholm;Finland:Helsinki;Denmark:Copenhagen;Iceland:Reykjavik;Poland:Warsaw;Hungary:Budapest;Greece:Athens;"
    "Belgium:Brussels;Switzerland:Bern;the Netherlands:Amsterdam;the United Kingdom:London;England:London;Scotland:Edinburgh;"
    "Wales:Cardiff;Romania:Bucharest;Bulgaria:Sofia;Croatia:Zagreb;Serbia:Belgrade;Ukraine:Kyiv;Russia:Moscow;"
    "Turkey:Ankara;Egypt:Cairo;Morocco:Rabat;Kenya:Nairobi;Nigeria:Abuja;Ghana:Accra;Ethiopia:Addis Ababa;Tunisia:Tunis;"
    "Algeria:Algiers;Senegal:Dakar;Uganda:Kampala;China:Beijing;Japan:Tokyo;South Korea:Seoul;India:New Delhi;"
    "Pakistan:Islamabad;Nepal:Kathmandu;Thailand:Bangkok;Vietnam:Hanoi;Indonesia:Jakarta;Malaysia:Kuala Lumpur;"
    "the Philippines:Manila;Mongolia:Ulaanbaatar;Iran:Tehran;Iraq:Baghdad;Jordan:Amman;Lebanon:Beirut;Qatar:Doha;"
    "Saudi Arabia:Riyadh;Australia:Canberra;New Zealand:Wellington;Canada:Ottawa;the United States:Washington, D.C.;"
    "Mexico:Mexico City;Cuba:Havana;Jamaica:Kingston;Brazil:Brasilia;Argentina:Buenos Aires;Chile:Santiago;Peru:Lima;"
    "Colombia:Bogota;Venezuela:Caracas;Ecuador:Quito;Uruguay:Montevideo;Paraguay:Asuncion;Estonia:Tallinn;Latvia:Riga;"
    "Lithuania:Vilnius;Slovakia:Bratislava;Slovenia:Ljubljana;Czechia:Prague;Cyprus:Nicosia;Malta:Valletta"
)

DEFINITIONS = _pairs(
    "an algorithm:a list of clear steps that solves a problem;a computer:a machine that follows instructions to work with data;"
    "a variable:a name that stands for a value in a program;a function:a named piece of code that can be called again and again;"
    "a loop:a part of a program that repeats some steps;a list:an ordered collection of values;"
    "a dictionary:a collection that maps keys to values;a string:a piece of text in a program;"
    "a network:a group of computers that exchange messages;a database:a program that stores data and answers questions about it;"
    "a server:a computer or program that answers requests from others;a cache:a small and fast store for values that are needed again;"
    "a queue:a line in which the first to arrive is the first to be served;a stack:a pile in which the last item added is the first one taken;"
    "a compiler:a program that translates code into a form that a machine can run;"
    "a language model:a program that predicts the next word of a text;"
    "a neural network:a model made of many simple units whose weights are learned from examples;"
    "machine learning:a way to let computers learn rules from examples;a token:a small piece of text that a language model reads or writes;"
    "photosynthesis:the process by which plants turn light, water and air into food;"
    "gravity:the force that pulls things toward each other;energy:the ability to do work;an atom:the smallest piece of an element;"
    "a molecule:a group of atoms held together;evaporation:the change of a liquid into a gas;"
    "a volcano:an opening in the ground from which hot rock and gas can come;an earthquake:a sudden shaking of the ground;"
    "a river:a stream of water that flows to a lake or the sea;an island:a piece of land with water all around it;"
    "a desert:a dry place where very little rain falls;a forest:a large area covered with trees;a mountain:a very high hill;"
    "the ocean:the large body of salt water that covers most of the earth;a planet:a large round body that moves around a star;"
    "a star:a huge ball of hot gas that gives off light;the moon:the round body that moves around the earth;"
    "the sun:the star at the center of our solar system;a rainbow:an arc of colors seen when the sun shines through rain;"
    "a democracy:a system in which the people choose their leaders;a museum:a place where interesting objects are kept and shown;"
    "a library:a place where books are kept and lent;a hospital:a place where sick people are treated;"
    "a university:a school for advanced study;a noun:a word that names a person, a place or a thing;"
    "a verb:a word that describes an action;an adjective:a word that describes a noun;a poem:a short text with rhythm and images;"
    "a novel:a long story in the form of a book;a triangle:a shape with three sides;a square:a shape with four equal sides;"
    "a circle:a round shape whose points are all equally far from the center;a prime number:a number above one that can be divided only by one and itself;"
    "an even number:a number that can be divided by two;a fraction:a part of a whole number;an angle:the space between two lines that meet;"
    "patience:the ability to wait calmly;courage:the strength to act in spite of fear;friendship:a close and kind bond between people;"
    "honesty:the habit of telling the truth;kindness:the wish to help others;trust:the belief that someone will do what is right;"
    "wisdom:good judgment that comes from experience;happiness:the feeling of being pleased with life;"
    "a bicycle:a vehicle with two wheels that is moved by pedals;a train:a row of wagons pulled along rails;"
    "a bridge:a structure that lets people cross a river or a road;a recipe:a list of steps for making a dish;"
    "bread:a food that is baked from flour, water and yeast;cheese:a food made from milk;honey:a sweet food made by bees;"
    "tea:a drink made from leaves and hot water;coffee:a drink made from roasted beans;music:sound arranged in a pleasing way;"
    "chess:a board game for two players;football:a game in which two teams try to kick a ball into a goal;"
    "an orchestra:a large group of musicians who play together;a baton:a short stick that is passed on in a relay race;"
    "inference:the use of a trained model to answer a request;latency:the time between a request and its answer;"
    "throughput:the amount of work done in a given time;a scheduler:a program that decides what runs next and where;"
    "a router:a device or program that sends each message to the right place;memory:the part of a computer that holds data in use"
)

OPPOSITES = tuple(
    (a, b)
    for a, b in (
        pair.split("/")
        for pair in (
            "hot/cold big/small fast/slow high/low old/new happy/sad light/dark open/closed full/empty hard/soft wet/dry "
            "early/late rich/poor strong/weak loud/quiet clean/dirty up/down left/right day/night good/bad true/false "
            "first/last long/short thick/thin wide/narrow near/far inside/outside begin/end love/hate win/lose buy/sell "
            "push/pull give/take brave/afraid deep/shallow sharp/dull sweet/sour heavy/weightless smooth/rough above/below"
        ).split()
    )
)
PLURALS = _pairs(
    "child:children;mouse:mice;foot:feet;tooth:teeth;man:men;woman:women;person:people;goose:geese;leaf:leaves;knife:knives;"
    "wolf:wolves;city:cities;baby:babies;box:boxes;bus:buses;cat:cats;dog:dogs;house:houses;sheep:sheep;fish:fish;story:stories;"
    "country:countries;potato:potatoes;hero:heroes;shelf:shelves;half:halves;book:books;car:cars;glass:glasses;watch:watches"
)
PAST_TENSE = _pairs(
    "go:went;see:saw;eat:ate;run:ran;take:took;give:gave;come:came;write:wrote;read:read;speak:spoke;drive:drove;sing:sang;"
    "swim:swam;find:found;think:thought;buy:bought;bring:brought;make:made;have:had;do:did;say:said;know:knew;sleep:slept;"
    "walk:walked;play:played;open:opened;build:built;teach:taught;begin:began;break:broke;choose:chose;fly:flew;grow:grew"
)
ELEMENTS = _pairs(
    "hydrogen:H;helium:He;carbon:C;nitrogen:N;oxygen:O;sodium:Na;magnesium:Mg;aluminium:Al;silicon:Si;sulfur:S;chlorine:Cl;"
    "potassium:K;calcium:Ca;iron:Fe;copper:Cu;zinc:Zn;silver:Ag;gold:Au;mercury:Hg;lead:Pb;tin:Sn;neon:Ne;lithium:Li;nickel:Ni"
)
ANIMAL_SOUNDS = _pairs(
    "cat:meow;dog:woof;cow:moo;duck:quack;sheep:baa;horse:neigh;pig:oink;lion:roar;bee:buzz;owl:hoot;frog:croak;snake:hiss;crow:caw"
)
ANIMAL_HOMES = _pairs(
    "bee:in a hive;bird:in a nest;rabbit:in a burrow;dog:in a kennel;horse:in a stable;lion:in a den;fish:in the water;"
    "camel:in the desert;penguin:on cold coasts in the south;whale:in the ocean;spider:in a web;frog:near ponds;fox:in a den"
)
YOUNG_ANIMALS = _pairs(
    "cat:a kitten;dog:a puppy;cow:a calf;sheep:a lamb;horse:a foal;duck:a duckling;goat:a kid;pig:a piglet;lion:a cub;bear:a cub;frog:a tadpole;hen:a chick;kangaroo:a joey"
)
CATEGORIES = {
    "colors": ("red", "blue", "green", "yellow", "purple", "orange", "black", "white"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "pear"),
    "vegetables": ("carrot", "potato", "onion", "cabbage", "spinach", "pea", "leek", "celery"),
    "animals": ("cat", "dog", "horse", "lion", "tiger", "elephant", "rabbit", "fox"),
    "programming languages": ("Python", "Java", "C", "Rust", "Go", "Ruby", "Haskell", "Kotlin"),
    "musical instruments": ("piano", "violin", "guitar", "flute", "drum", "trumpet", "harp", "cello"),
    "sports": ("football", "tennis", "swimming", "hockey", "rowing", "boxing", "skiing", "golf"),
    "continents": ("Africa", "Asia", "Europe", "North America", "South America", "Australia", "Antarctica"),
    "metals": ("iron", "copper", "gold", "silver", "tin", "zinc", "lead", "nickel"),
    "seasons": ("spring", "summer", "autumn", "winter", "the dry season"),
}
TRIVIA: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How many days are in a week?", "How many days does a week have?"), "There are seven days in a week."),
    (
        ("How many months are in a year?", "How many months does a year have?"),
        "There are twelve months in a year.",
    ),
    (("How many hours are in a day?", "How many hours does a day have?"), "There are 24 hours in a day."),
    (("How many continents are there?", "What is the number of continents?"), "There are seven continents."),
    (
        (
            "Which planet is the largest?",
            "What is the largest planet?",
            "What is the biggest planet in the solar system?",
        ),
        "Jupiter is the largest planet in the solar system.",
    ),
    (
        ("Which planet is closest to the sun?", "What is the planet nearest to the sun?"),
        "Mercury is the planet closest to the sun.",
    ),
    (
        ("What is the largest ocean?", "Which ocean is the biggest?"),
        "The Pacific Ocean is the largest ocean.",
    ),
    (
        ("What is the longest river?", "Which river is the longest in the world?"),
        "The Nile is often named as the longest river in the world.",
    ),
    (
        ("What is the highest mountain?", "Which mountain is the highest in the world?"),
        "Mount Everest is the highest mountain in the world.",
    ),
    (("What color is the sky?", "Which color does the sky have?"), "On a clear day the sky is blue."),
    (
        ("Why is the sky blue?", "Explain why the sky is blue."),
        "The sky is blue because the air scatters blue light more than red light.",
    ),
    (("What color is grass?", "Which color does grass have?"), "Grass is green."),
    (("What color is a banana?", "Which color does a banana have?"), "A ripe banana is yellow."),
    (
        ("At what temperature does water boil?", "When does water boil?"),
        "Water boils at 100 degrees Celsius at sea level.",
    ),
    (
        ("At what temperature does water freeze?", "When does water freeze?"),
        "Water freezes at 0 degrees Celsius.",
    ),
    (
        ("Who wrote Romeo and Juliet?", "Who is the author of Romeo and Juliet?", "Who wrote Hamlet?"),
        "It was written by William Shakespeare.",
    ),
    (
        ("Who painted the Mona Lisa?", "Which painter made the Mona Lisa?"),
        "The Mona Lisa was painted by Leonardo da Vinci.",
    ),
    (
        ("Who was the first person on the moon?", "Who first walked on the moon?"),
        "Neil Armstrong was the first person to walk on the moon.",
    ),
    (
        ("Who discovered gravity?", "Who described the law of gravity?"),
        "Isaac Newton described the law of gravity.",
    ),
    (
        ("Who developed the theory of relativity?", "Who is known for the theory of relativity?"),
        "Albert Einstein developed the theory of relativity.",
    ),
    (
        ("Who created Python?", "Who made the Python language?", "Who invented Python?"),
        "Python was created by Guido van Rossum.",
    ),
    (
        ("What is Python?", "Tell me about Python.", "What is Python used for?"),
        "Python is a programming language that is easy to read. It is used for web services, data analysis and machine learning.",
    ),
    (
        ("How many legs does a spider have?", "What is the number of legs of a spider?"),
        "A spider has eight legs.",
    ),
    (("How many legs does an insect have?", "How many legs do insects have?"), "An insect has six legs."),
    (
        ("How many sides does a triangle have?", "How many sides are in a triangle?"),
        "A triangle has three sides.",
    ),
    (("How many sides does a hexagon have?", "How many sides are in a hexagon?"), "A hexagon has six sides."),
    (
        ("What do plants need to grow?", "What does a plant need?"),
        "Plants need light, water and air to grow.",
    ),
    (("What do bees make?", "What is made by bees?"), "Bees make honey."),
    (
        ("What is the fastest land animal?", "Which animal runs fastest?"),
        "The cheetah is the fastest land animal.",
    ),
    (
        ("What is the largest animal?", "Which animal is the biggest?"),
        "The blue whale is the largest animal.",
    ),
    (
        ("What is the largest country?", "Which country is the largest by area?"),
        "Russia is the largest country by area.",
    ),
    (
        ("What is the chemical formula of water?", "What is water made of?"),
        "Water is made of hydrogen and oxygen; its formula is H2O.",
    ),
    (
        ("What language do people speak in Brazil?", "Which language is spoken in Brazil?"),
        "People in Brazil speak Portuguese.",
    ),
    (
        ("What language do people speak in France?", "Which language is spoken in France?"),
        "People in France speak French.",
    ),
    (
        ("Where is the Eiffel Tower?", "In which city is the Eiffel Tower?"),
        "The Eiffel Tower is in Paris, France.",
    ),
    (
        ("Where are the pyramids?", "In which country are the great pyramids?"),
        "The great pyramids are in Egypt.",
    ),
    (
        ("What is the speed of light?", "How fast is light?"),
        "Light travels at about 300,000 kilometers per second.",
    ),
    (
        ("How far is the moon?", "What is the distance to the moon?"),
        "The moon is about 384,000 kilometers away from the earth.",
    ),
    (
        ("How many letters are in the English alphabet?", "How many letters does the alphabet have?"),
        "The English alphabet has 26 letters.",
    ),
    (
        ("How many seconds are in an hour?", "What is one hour in seconds?"),
        "There are 3600 seconds in an hour.",
    ),
    (
        ("What are the primary colors?", "Name the primary colors."),
        "The primary colors are red, yellow and blue.",
    ),
    (
        ("What are the four seasons?", "Name the four seasons."),
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        ("What is the sun made of?", "What does the sun consist of?"),
        "The sun is made mostly of hydrogen and helium.",
    ),
    (
        ("Why do leaves fall in autumn?", "Why do trees lose their leaves?"),
        "Trees drop their leaves in autumn to save water and energy for the winter.",
    ),
    (
        ("Why do we sleep?", "Why do people need sleep?"),
        "We sleep so that the body can rest and the brain can sort what it has learned.",
    ),
    (
        ("Why is the sea salty?", "Why is ocean water salty?"),
        "The sea is salty because rivers wash salts out of the rocks and carry them to it.",
    ),
    (
        ("What causes rain?", "Why does it rain?", "How does rain form?"),
        "Water rises into the air as vapor, cools down into clouds, and falls as rain when the drops become heavy.",
    ),
    (
        ("What causes the seasons?", "Why are there seasons?"),
        "The seasons come from the tilt of the earth as it moves around the sun.",
    ),
)
