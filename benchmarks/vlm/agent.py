"""The task: name the colour of a square."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from PIL import Image

from swarmq import Episode, Outcome

QUESTION = "Which colour?"
COLOURS = {"red": (200, 40, 40), "blue": (50, 70, 210)}
SIDE = 56
"""Pixels of an image each way: 2 x 2 places in a prompt."""
SHADE = 35
"""Most by which a channel of a square differs from its colour."""
POOL = DefaultHttpxClient()
"""Connections that all episodes share."""


def draw(colour: str, random_numbers: random.Random) -> Image.Image:
    """A square of a shade of the colour, anywhere on a grey ground."""
    shade = tuple(min(max(channel + random_numbers.randint(-SHADE, SHADE), 0), 255) for channel in COLOURS[colour])
    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    size = random_numbers.randint(SIDE // 2, SIDE)
    left, top = (random_numbers.randint(0, SIDE - size) for _ in range(2))
    image.paste(shade, (left, top, left + size, top + size))
    return image


def encode(image: Image.Image) -> str:
    """The image as a data URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_tasks(count: int, seed: int) -> list[dict[str, str]]:
    """As many tasks of each colour."""
    random_numbers, names = random.Random(seed), list(COLOURS)
    colours = [names[number % len(names)] for number in range(count)]
    return [
        {"id": f"{seed}-{number}", "colour": colour, "image": encode(draw(colour, random_numbers))}
        for number, colour in enumerate(colours)
    ]


def ask(image: str) -> list[Any]:
    shown = {"type": "image_url", "image_url": {"url": image}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}]


def attempt(ep: Episode) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL, max_retries=4)
    answer = model.chat.completions.create(model=ep.model, messages=ask(ep.payload["image"]))
    said = (answer.choices[0].message.content or "").strip()
    return Outcome(float(said == ep.payload["colour"]), success=said == ep.payload["colour"])
