"""Structured output (a pydantic model, a choice, a regex) with the official client and a running server.

    pip install openai
    serve-llm demo
    python structured_output.py [http://127.0.0.1:8000/v1]

The demo model does not know English: its answers have the right form but no meaning.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=30)
    minutes: int = Field(ge=1, le=240)
    difficulty: Literal["easy", "medium", "hard"]
    ingredients: list[Annotated[str, Field(max_length=20)]] = Field(min_length=1, max_length=4)


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        reply = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "A recipe for pancakes, please."}],
            response_format=Recipe,
            seed=1,
        )
        recipe = reply.choices[0].message.parsed
        assert recipe is not None
        print(f"{recipe.title!r} takes {recipe.minutes} minutes and is {recipe.difficulty}")
        for structured_outputs in ({"choice": ["yes", "no"]}, {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}):
            completion = client.completions.create(
                model="demo", prompt="The answer: ", seed=1, extra_body={"structured_outputs": structured_outputs}
            )
            print(structured_outputs, "->", completion.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
