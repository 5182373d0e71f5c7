"""Instructor: objects of a Pydantic class, by a forced tool or by a JSON schema."""

import sys
from typing import Literal

import instructor
import openai
import pydantic
from answers import BASE_URL, KEY, MODEL, QUESTION, tell


class Verdict(pydantic.BaseModel):
    """A verdict."""

    right: bool
    digit: Literal["one", "two", "three"]


mode = instructor.Mode.TOOLS if "tools" in sys.argv else instructor.Mode.JSON_SCHEMA
client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)
for _ in range(2):
    messages = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(model=MODEL, messages=messages, response_model=Verdict, max_retries=0)
    tell(parsed=found.model_dump())
