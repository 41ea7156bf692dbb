r"""What may stand behind a value without changing it: units, percent and degree signs, "(mod n)".

Behind a value, up to three words in \text{} are a unit; in plain type only the words listed here are,
since 3 abc is a product. Two units that are both known must be the same one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# every row is one unit
UNITS = """
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
mph
g gram grams
kg kilogram kilograms
lb lbs pound pounds
oz ounce ounces
l liter liters litre litres
ml milliliter milliliters
gal gallon gallons
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
yr yrs year years
dollar dollars usd
cent cents
rad radian radians
unit units
"""
COUNTED = "people persons students men women children ways times solutions pairs points games books apples marbles"
UNIT_OF: dict[str, str] = {word: row.split()[0] for row in UNITS.strip().splitlines() for word in row.split()}
PLAIN_WORDS = {word for word in UNIT_OF if len(word) > 1} | set(COUNTED.split()) | {"square", "cubic", "sq", "per"}
# words behind a value that change what is said, or say nothing
OTHER_WORDS = """
or and not no is are if for when to than less more least most about between except percent mod half dozen hundred
thousand million billion trillion where with but plus minus over equals from at
of the them they there this that it its as by only
"""
NOT_UNITS = frozenset(OTHER_WORDS.split())
SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}

MODULUS = re.compile(
    r"\s*(?:\(\s*)?(?:\\[pb]?mod(?![a-zA-Z])|\\text\s*\{\s*\(?\s*mod\s*\}|(?<![A-Za-z\\])mod(?![A-Za-z]))\s*"
    r"(?P<modulus>\{[^{}]*\}|[0-9A-Za-z^]+)\s*(?:\\text\s*\{\s*\)\s*\})?\)?$"
)
PERCENT = re.compile(r"(?:\s*\\text\s*\{)?\s*(?:\\?%|\bpercent(?:age)?\b)\s*\}?$")
DEGREES = re.compile(r"\s*(?:\^\\circ|(?:\\text\s*\{)?\s*\bdegrees?\b\s*\}?)$")
TRIGONOMETRIC = re.compile(r"sin|cos|tan|cot|sec|csc")  # the sign belongs to what it is applied to
TEXT_UNIT = re.compile(r"\s*\\text\s*\{(?P<words>[^{}]*)\}\s*(?P<power>\^\s*\{?[23]\}?)?$")
PLAIN_UNIT = re.compile(r"(?<=[0-9})\]])(?P<words>(?:\s+[A-Za-z]+){1,3})\s*(?P<power>\^\s*\{?[23]\}?)?$")
GLUED_UNIT = re.compile(r"(?<=[0-9])(?P<words>[A-Za-z]{2,})(?P<power>\^\s*\{?[23]\}?)?$")
SCALE = re.compile(r"\s*(?:\\text\s*\{)?\s*(?P<scale>thousand|million|billion|trillion)\s*\}?(?=$|\s|\\)")


@dataclass(frozen=True)
class Marks:
    rest: str
    unit: str = ""
    percent: bool = False
    degrees: bool = False
    modulus: str = ""


def split_marks(text: str) -> Marks:
    """Take the marks off the end of an expression."""
    rest, modulus = text.strip(), ""
    if found := MODULUS.search(rest):
        rest, modulus = rest[: found.start()].strip(), found["modulus"].strip("{} ")
    rest = SCALE.sub(lambda found: rf" \cdot 10^{{{SCALES[found['scale']]}}}", rest)
    percent = PERCENT.search(rest)
    if percent and percent.start():
        return Marks(rest[: percent.start()], percent=True, modulus=modulus)
    degrees = DEGREES.search(rest)
    if degrees and degrees.start() and not TRIGONOMETRIC.search(rest):
        return Marks(rest[: degrees.start()], degrees=True, modulus=modulus)
    for pattern in (TEXT_UNIT, PLAIN_UNIT, GLUED_UNIT):
        found = pattern.search(rest)
        if found and found.start() and _is_unit(found["words"], in_text=pattern is TEXT_UNIT):
            return Marks(rest[: found.start()], unit=_unit(found["words"], found["power"] or ""), modulus=modulus)
    return Marks(rest, modulus=modulus)


def units_agree(one: str, other: str) -> bool:
    """Whether two units may stand behind the same quantity: unless both are known and differ."""
    known = [
        unit for unit in (one, other) if unit and all(word in UNIT_OF.values() for word in unit.rstrip("23").split())
    ]
    return len(known) < 2 or one == other


def _is_unit(words: str, in_text: bool) -> bool:
    found = re.findall(r"[A-Za-z]+", words)
    if not 0 < len(found) <= 3 or re.search(r"[0-9=<>()]", words) or NOT_UNITS & {word.lower() for word in found}:
        return False
    return in_text or all(word.lower() in PLAIN_WORDS for word in found)


def _unit(words: str, power: str) -> str:
    """A unit in one spelling: "square centimeters" and cm^2 are "cm2"."""
    found = re.findall(r"[a-z]+", words.lower())
    exponent = re.sub("[^23]", "", power)
    for name, number in (("square", "2"), ("sq", "2"), ("cubic", "3")):
        if name in found:
            found.remove(name)
            exponent = number
    return " ".join(str(UNIT_OF.get(word, word)) for word in found) + exponent
