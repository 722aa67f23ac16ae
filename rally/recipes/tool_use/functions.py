"""The functions that single-turn tasks ask for: parameters with the values to draw, and requests that name the values.

A request names every required value as the call must have it. An optional parameter is asked for by a sentence of its
own, or not at all. Domains of HELD_OUT occur in no training task.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["string", "integer", "number", "boolean", "array"]
CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Tallinn", "Perth", "Quito", "Cork", "Pune")
PEOPLE = ("Ada Brandt", "Ravi Nair", "Lena Horak", "Tom Weller", "Mei Sato", "Omar Haddad", "Nina Falk")
DATES = ("2027-01-12", "2027-02-03", "2027-03-28", "2027-05-09", "2027-06-17", "2027-08-21", "2027-10-30")


@dataclass(frozen=True)
class Param:
    """A parameter. `values` are those to draw, for integers and numbers the lowest and the highest. An optional one has
    a `default`, and a sentence `asked` with {value}."""

    name: str
    kind: Kind
    about: str
    values: tuple[Any, ...]
    enum: bool = False
    default: Any = None
    asked: str = ""

    @property
    def required(self) -> bool:
        return not self.asked

    def drawn(self, rng: random.Random) -> Any:
        if self.kind == "integer":
            return rng.randint(*self.values)
        if self.kind == "number":
            return round(rng.uniform(*self.values), 2)
        if self.kind == "array":
            return rng.sample(self.values, rng.randint(2, 3))
        return rng.choice(self.values)

    def schema(self) -> dict[str, Any]:
        about = self.about if self.required else f"{self.about} The default is {self.default!r}."
        schema: dict[str, Any] = {"type": self.kind, "description": about}
        if self.kind == "array":
            schema["items"] = {"type": "string"}
        return {**schema, "enum": list(self.values)} if self.enum else schema


@dataclass(frozen=True)
class OfferedFunction:
    domain: str
    name: str
    about: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]


def _text(name: str, about: str, *values: str) -> Param:
    return Param(name, "string", about, values)


def _choice(name: str, about: str, *values: str) -> Param:
    return Param(name, "string", about, values, enum=True)


def _whole(name: str, about: str, low: int, high: int) -> Param:
    return Param(name, "integer", about, (low, high))


def _real(name: str, about: str, low: float, high: float) -> Param:
    return Param(name, "number", about, (low, high))


_CITY = _text("city", "The name of the city.", *CITIES)
_DATE = _text("date", "The date, as YYYY-MM-DD.", *DATES)

FUNCTIONS: tuple[OfferedFunction, ...] = (
    OfferedFunction(
        "travel",
        "find_trains",
        "Lists the trains between two cities on a day.",
        (
            _text("origin", "The city of departure.", *CITIES[:5]),
            _text("destination", "The city of arrival.", *CITIES[5:]),
            _DATE,
            Param(
                "direct", "boolean", "Only trains without a change.", (True,), default=False, asked="Only direct ones."
            ),
        ),
        (
            "Which trains go from {origin} to {destination} on {date}?",
            "I need to get from {origin} to {destination} by train on {date}.",
        ),
    ),
    OfferedFunction(
        "travel",
        "reserve_room",
        "Reserves a hotel room.",
        (
            _CITY,
            _whole("nights", "The number of nights.", 1, 14),
            _choice("room", "The kind of room.", "single", "double", "suite"),
        ),
        (
            "Reserve a {room} room in {city} for {nights} nights.",
            "I stay in {city} for {nights} nights and want a {room} room.",
        ),
    ),
    OfferedFunction(
        "weather",
        "forecast",
        "Returns the weather forecast of a city.",
        (
            _CITY,
            _whole("days", "The number of days.", 2, 10),
            Param(
                "unit",
                "string",
                "The unit of temperatures.",
                ("fahrenheit", "kelvin"),
                default="celsius",
                asked="Give the temperatures in {value}.",
            ),
        ),
        ("What will the weather be in {city} over the next {days} days?", "Show a forecast of {days} days for {city}."),
    ),
    OfferedFunction(
        "weather",
        "air_quality",
        "Returns the concentration of a pollutant in the air of a city.",
        (_CITY, _choice("pollutant", "The pollutant.", "ozone", "pm10", "nitrogen dioxide")),
        ("How much {pollutant} is in the air of {city}?", "Look up the {pollutant} level in {city}."),
    ),
    OfferedFunction(
        "kitchen",
        "scale_recipe",
        "Scales the amounts of a recipe to a number of servings.",
        (
            _text("dish", "The name of the dish.", "lentil soup", "paella", "apple pie", "ramen", "moussaka"),
            _whole("servings", "The number of servings.", 2, 40),
        ),
        (
            "I cook {dish} for {servings} servings. How much do I need of everything?",
            "Scale {dish} to {servings} servings.",
        ),
    ),
    OfferedFunction(
        "kitchen",
        "find_recipes",
        "Finds recipes with some ingredients.",
        (
            Param("ingredients", "array", "What to cook with.", ("leek", "rice", "tofu", "beans", "eggs", "spinach")),
            _whole("minutes", "The longest time to cook, in minutes.", 10, 90),
        ),
        (
            "What can I cook with {ingredients} in at most {minutes} minutes?",
            "Find recipes with {ingredients} that take no longer than {minutes} minutes.",
        ),
    ),
    OfferedFunction(
        "finance",
        "loan_payment",
        "Computes the monthly payment of a loan.",
        (
            _whole("amount", "The amount of the loan.", 1000, 90000),
            _real("rate", "The yearly interest rate in percent.", 0.5, 9.5),
            _whole("years", "The years until it is repaid.", 1, 30),
        ),
        (
            "What is the monthly payment for a loan of {amount} at {rate} percent over {years} years?",
            "I borrow {amount} for {years} years at {rate} percent. What do I pay each month?",
        ),
    ),
    OfferedFunction(
        "finance",
        "convert_currency",
        "Converts an amount into another currency.",
        (
            _real("amount", "The amount.", 5, 900),
            _choice("source", "The currency to convert from.", "EUR", "JPY", "KES"),
            _choice("target", "The currency to convert to.", "USD", "PEN", "NOK"),
        ),
        ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."),
    ),
    OfferedFunction(
        "geometry",
        "cylinder_volume",
        "Computes the volume of a cylinder.",
        (_real("radius", "The radius.", 0.5, 20), _real("height", "The height.", 1, 90)),
        (
            "What is the volume of a cylinder with radius {radius} and height {height}?",
            "A cylinder has a height of {height} and a radius of {radius}. Compute its volume.",
        ),
    ),
    OfferedFunction(
        "geometry",
        "polygon_angle",
        "Computes the inner angle of a regular polygon.",
        (_whole("sides", "The number of sides.", 3, 40),),
        ("How large is the inner angle of a regular polygon with {sides} sides?",),
    ),
    OfferedFunction(
        "messages",
        "send_message",
        "Sends a text message.",
        (
            _text("recipient", "The full name of who gets it.", *PEOPLE),
            _text("text", "The text.", "I am late", "See you at noon", "The parcel is here", "Call me back"),
            Param("urgent", "boolean", "Whether to mark it.", (True,), default=False, asked="Mark it as urgent."),
        ),
        ('Send "{text}" to {recipient}.', 'Write to {recipient}: "{text}".'),
    ),
    OfferedFunction(
        "messages",
        "schedule_call",
        "Schedules a telephone call.",
        (
            _text("person", "The full name of who is called.", *PEOPLE),
            _DATE,
            _text("time", "The time, as HH:MM.", "09:30", "11:00", "14:15", "16:45"),
        ),
        ("Schedule a call with {person} on {date} at {time}.", "I want to call {person} on {date}, at {time}."),
    ),
    OfferedFunction(
        "library",
        "search_books",
        "Searches the catalogue of a library.",
        (
            _text("author", "The full name of the author.", *PEOPLE),
            _choice("language", "The language of the book.", "english", "german", "hindi"),
            Param("limit", "integer", "The most results.", (3, 9), default=10, asked="Show at most {value} results."),
        ),
        ("Which {language} books by {author} do you have?", "Search for books by {author} in {language}."),
    ),
    OfferedFunction(
        "library",
        "extend_loan",
        "Extends the loan of a book.",
        (_whole("book_id", "The number of the book.", 1000, 9999), _whole("weeks", "The weeks to add.", 1, 4)),
        ("Extend the loan of book {book_id} by {weeks} weeks.", "I need book {book_id} for {weeks} more weeks."),
    ),
    OfferedFunction(
        "fitness",
        "burned_energy",
        "Estimates the energy that an activity burns.",
        (
            _choice("activity", "The activity.", "rowing", "cycling", "climbing"),
            _whole("minutes", "How long it lasts, in minutes.", 15, 180),
            _real("weight", "The weight of the person in kilograms.", 45, 110),
        ),
        (
            "How much energy does a person of {weight} kg burn by {minutes} minutes of {activity}?",
            "I weigh {weight} kg. What do {minutes} minutes of {activity} burn?",
        ),
    ),
    OfferedFunction(
        "fitness",
        "log_run",
        "Records a run in a training diary.",
        (_DATE, _real("kilometres", "The distance in kilometres.", 2, 42)),
        ("On {date} I ran {kilometres} kilometres. Record that.", "Record a run of {kilometres} km on {date}."),
    ),
    OfferedFunction(
        "garden",
        "watering_plan",
        "Plans when to water a plant.",
        (
            _choice("plant", "The plant.", "tomato", "fern", "lavender", "basil"),
            _real("pot_litres", "The size of the pot in litres.", 1, 30),
        ),
        (
            "How do I water a {plant} in a pot of {pot_litres} litres?",
            "Plan the watering of a {plant}, pot of {pot_litres} litres.",
        ),
    ),
    OfferedFunction(
        "garden",
        "order_seeds",
        "Orders packets of seeds.",
        (
            Param("kinds", "array", "The kinds of seeds.", ("chard", "radish", "dill", "peas", "kale")),
            _whole("packets", "The packets of each kind.", 1, 12),
        ),
        ("Order {packets} packets each of {kinds} seeds.", "I need seeds of {kinds}, {packets} packets of each kind."),
    ),
)
HELD_OUT = ("garden", "fitness")


def functions(held_out: bool) -> Sequence[OfferedFunction]:
    """The functions of the domains that are held out, or of the others."""
    return [one for one in FUNCTIONS if (one.domain in HELD_OUT) == held_out]
