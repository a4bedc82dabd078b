"""The closed word lists of the demo task; no logic lives here."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    """
    Ada Alma Anton Arlo Bela Boris Bruno Carla Cora Dario Dora Edgar Elsa Emil Enzo Erik Fay
    Felix Flora Gina Greta Gus Hanna Hugo Ida Igor Iris Ivan Jonas Julia Kira Klaus Lena Leo
    Lotte Luca Magda Mara Milo Mona Nadia Nils Nora Olga Oscar Otto Paula Pia Quinn Rita Rosa
    Rufus Sam Selma Tilda Timo Ulla Vera Viktor Wanda Yara Zeno
    """
)

LAST_NAMES = _words(
    """
    Abel Adler Baker Banks Berg Blum Boyd Brandt Burke Cole Dahl Drake Ellis Engel Falk Finch
    Frost Gale Grant Haas Hale Hardy Hart Holm Hunt Jensen Kane Keller Knox Koch Lang Lund
    Marsh Meyer Moss Nash Noble Nolan Olsen Page Pike Price Reed Rossi Roth Ryder Sauer Shaw
    Stone Swift Thorn Vance Voss Walsh Ward Weber West Winter York
    """
)

PLACE_FIRST = _words(
    """
    Alder Amber Ash Beech Birch Black Bright Cedar Clear Copper Crow Deep Eagle East Elm Fair
    Fern Fox Glass Gold Gray Green Hazel High Iron Kings Lake Long Maple Mill North Oak Old
    Pine Queens Raven River Salt Silver South Spring Still Wolf
    """
)

PLACE_SECOND = _words(
    """
    Bay Bridge Creek Cross Falls Field Ford Glen Grove Harbor Hill Hollow Point Ridge
    """
)

JOBS = _words(
    """
    baker barber blacksmith bookseller butcher captain carpenter chemist clerk cook dentist
    doctor driver farmer fisher florist gardener hunter judge lawyer librarian mason miller
    miner nurse painter pilot plumber porter potter printer sailor shepherd singer surgeon
    tailor teacher waiter weaver writer
    """
)

FOODS = _words(
    """
    apples bread butter cake cheese cherries chocolate cookies corn dates dumplings eggs figs
    grapes ham honey jam melons muffins noodles nuts olives oranges pancakes pasta peaches
    pears pickles pie plums popcorn porridge pretzels pudding rice salad sausages toast
    waffles
    """
)

OBJECTS = _words(
    """
    accordion anchor axe barrel basket bell bench bicycle blanket boat bottle bowl broom
    bucket camera candle canoe carpet cart chair clock coat compass cup desk drum fiddle flute
    globe guitar hammer harp hat kettle kite ladder lamp lantern map mirror oven piano pillow
    plough radio ring rope saddle shovel sled spoon stove sword table telescope tent trumpet
    trunk umbrella vase violin wagon wheelbarrow whistle
    """
)

COLOURS = _words(
    """
    beige blue brown crimson cyan ivory lilac navy orange pink purple red scarlet teal
    turquoise violet white yellow
    """
)

CONTAINERS = _words(
    """
    aisle bay box cabinet closet corner crate cupboard drawer hall hut rack room shelf stall
    warehouse
    """
)

BUILDINGS = _words(
    """
    academy bakery bank brewery cafe chapel cinema clinic dairy gallery gym hotel inn library
    market museum pharmacy school station theatre tower zoo
    """
)

EVENTS = _words(
    """
    auction ball banquet concert contest dance exam fair festival funeral lecture match
    meeting opera parade party picnic play race regatta wedding workshop
    """
)

WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _words(
    """
    January February March April May June July August September October November December
    """
)

DISHES = _words(
    """
    broth casserole chowder chutney curry gravy omelette pasty pizza punch quiche relish
    risotto sauce soup stew stuffing tart
    """
)

INGREDIENTS = _words(
    """
    almonds barley basil beans cabbage carrots celery cinnamon cloves cream fennel flour
    garlic ginger kale leeks lemons lentils mint mushrooms mustard nutmeg oats oil onions
    paprika parsley peas pepper potatoes raisins rosemary sage spinach sugar thyme tomatoes
    turnips vinegar walnuts
    """
)

ANIMALS = _words(
    """
    bees bulls calves camels cats cows crickets dogs donkeys doves ducks falcons ferrets frogs
    geese goats hamsters hens horses lambs llamas mice mules ostriches owls oxen parrots
    peacocks pigeons pigs ponies quails rabbits sheep snails storks swans turkeys turtles
    """
)

LOCKS = _words(
    """
    archive attic barn basement cabin cellar chest garage greenhouse kiosk locker pantry safe
    shed studio vault
    """
)

FIXTURES = _words(
    """
    altar arch balcony billboard boiler chimney counter door elevator fence fountain fridge
    gate hedge mailbox mast pillar porch railing stairs statue wall well window
    """
)

NOTE_VERBS = _words(
    """
    bring burn carry check clean close collect count cover deliver empty feed fetch fill find
    fold guard hide lift lock mark mend move open pack paint plant polish pull push read
    return save sell send shake sort stack wash weigh wrap
    """
)

NOTE_ADJECTIVES = _words(
    """
    bitter broken cheap clever cold curious damp dusty empty fragile fresh frozen gentle heavy
    hollow humble large lonely loud muddy narrow new noisy plain quiet round rusty sharp short
    shiny silent small smooth soft sour spare strange sweet tall thick tiny warm wet wide
    wooden
    """
)

NOTE_NOUNS = _words(
    """
    bags balls blocks boards bolts books boots bricks brushes buttons cables cards chains
    chalk coals cones crowns curtains dishes feathers flags gloves hooks jars keys knives
    letters logs masks nails needles nets papers pebbles pencils pipes planks plates poles
    ropes rugs sacks scarves seeds shells shoes signs socks stamps sticks straps tiles tools
    towels toys trays tubes wheels wires
    """
)

NOTE_TAILS = (
    "before noon",
    "after supper",
    "at dawn",
    "by midnight",
    "during lunch",
    "until sunset",
    "with care",
    "without delay",
    "every morning",
    "twice daily",
    "once again",
    "next week",
    "this evening",
    "upstairs only",
    "for visitors",
    "from abroad",
    "in silence",
    "on time",
    "outside town",
    "near traffic",
    "under supervision",
    "like yesterday",
    "despite rain",
    "beyond doubt",
)
