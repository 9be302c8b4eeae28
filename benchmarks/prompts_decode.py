"""Twelve copy-heavy prompts, written for this benchmark: the right answer repeats much of the prompt, which is what prompt lookup is for.

They say which drafter copies better and faster, not how much a chat gains: on other work expect far less (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from draftheads.data.conversations import Conversation


def _line(text: str) -> str:
    """Prose as one line: a copy should not have to keep this file's line breaks."""
    return " ".join(text.split())


_CART = """class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        self.items.append({"name": name, "price": price, "count": count})

    def remove(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        return sum(item["price"] * item["count"] for item in self.items)"""

_TEMPERATURE = """def average_temperature(readings):
    total = 0
    for reading in readings:
        total = total + reading
    return total / len(readings)

def warmest_reading(readings):
    best = readings[0]
    for reading in readings:
        if reading > best:
            best = reading
    return best"""

_SERVER = """[server]
host = "0.0.0.0"
port = 8080
workers = 4
timeout = 30

[storage]
path = "/var/lib/gallery"
max_size = "20MB"
formats = ["jpg", "png", "webp"]

[mail]
host = "localhost"
port = 2525
sender = "gallery@example.org\""""

_FERRY = _line("""The ferry Margit leaves Holm pier at 7:15 every weekday and reaches Sandvik at 8:05. On Saturdays the first crossing is at 9:00, and
there is none on Sundays. A single ticket costs 42 crowns, and children under six travel free. Bicycles need a ticket of their own for 15 crowns.
Dogs must be on a lead and stay on the open deck. In strong wind the captain may cancel a crossing, and tickets are then valid on the next day.""")

_ORCHARD = _line("""The orchard behind the school was planted in 1961 by the pupils of the fourth class. It has thirty apple trees, nine pear trees
and one very old walnut. Each autumn the pupils pick the fruit and press it into juice. The juice is sold at the school gate, and the money pays for
the trip to the coast in June. In the winter of 2010 a storm broke seven trees. The pupils planted seven new ones in the following spring.""")

_ROWS = """Ines Vargas, 34, Lisbon, nurse
Tomas Brandt, 51, Kiel, carpenter
Amara Diallo, 28, Dakar, engineer
Jonas Lindqvist, 45, Malmo, teacher
Mei Tanaka, 39, Osaka, architect
Petra Novak, 62, Brno, librarian"""

_LIST = """Empty the water tank.
Close the gas valve under the stove.
Take the food out of the refrigerator.
Pull the blinds down on the south side.
Switch the heating to frost protection.
Lock the shed and the bicycle stand.
Hang the keys on the hook in the hall."""

_MENU = """{
  "monday": {"soup": "tomato", "main": "fried fish with rice", "price": 9.5},
  "tuesday": {"soup": "leek", "main": "lentil stew with bread", "price": 8.0},
  "wednesday": {"soup": "pumpkin", "main": "chicken with potatoes", "price": 10.5},
  "thursday": {"soup": "onion", "main": "noodles with mushrooms", "price": 8.5}
}"""

_LETTER = _line("""Dear Mr. Halvorsen, thank you for your visit to our workshop on Tuesday. We have measured the two windows again and can repair both
of them. The left window needs new hinges and a new handle. The right window needs a new pane of glass. The work takes one day, and we can come on
Thursday the ninth at eight in the morning. Please move the table and the lamp away from the windows. Yours sincerely, Karin Moberg""")

_PROMPTS = {
    "rename-method": f"Rename the method `remove` to `delete` and print the whole class again, otherwise unchanged.\n\n```python\n{_CART}\n```",
    "add-docstrings": f"Add a docstring to each function. Repeat the code as it is apart from that.\n\n```python\n{_TEMPERATURE}\n```",
    "change-port": f"Print this file again with port = 9090 instead of port = 8080.\n\n{_SERVER}",
    "repeat-exactly": f"Repeat the following text word for word.\n\n{_FERRY}",
    "replace-word": f"Write the following text again and replace the word \"pupils\" by \"children\" everywhere.\n\n{_ORCHARD}",
    "csv-to-table": f"Turn these lines into a Markdown table with the columns Name, Age, City and Job.\n\n{_ROWS}",
    "number-list": f"Number the lines of this list and copy each line exactly.\n\n{_LIST}",
    "edit-json": f"Raise the price of tuesday to 8.5 and print the whole JSON again.\n\n{_MENU}",
    "quote-sentences": f"Which sentences of this text mention tickets? Quote them word for word.\n\n{_FERRY}",
    "letter-lines": f"Copy this letter and put every sentence on a line of its own.\n\n{_LETTER}",
    "twice": f"Write this list two times, one copy below the other.\n\n{_LIST}",
    "people-json": f"Write these people as a JSON list of objects with the keys name, age, city and job.\n\n{_ROWS}",
}


def copy_heavy() -> list[Conversation]:
    """All twelve, in an order in which the kinds take turns."""
    return [Conversation(f"copy-{name}", [{"role": "user", "content": text}], "copy", "benchmark") for name, text in _PROMPTS.items()]
