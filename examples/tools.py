"""Let the model call a tool and send back the result, with the official client and a running server.

    pip install openai
    serve-llm <a model that knows tools>
    python tools.py [http://127.0.0.1:8000/v1]

The call is forced by `tool_choice`, so that it works with any model whose dialect the server knows.
"""

from __future__ import annotations

import sys

import openai
from openai import OpenAI
from pydantic import BaseModel, Field


class get_weather(BaseModel):
    """The weather of a city in the next days."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)

    def run(self) -> str:
        return ", ".join(["rain"] * self.days)


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        tools = [openai.pydantic_function_tool(get_weather)]
        messages: list[object] = [{"role": "user", "content": "The weather in Oslo for three days, please."}]
        reply = client.chat.completions.parse(
            model=model, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1
        )
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            weather = call.function.parsed_arguments
            result = weather.run()
            print(f"{call.function.name}({', '.join(f'{name}={value!r}' for name, value in weather)}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=60
        )
        print(reply.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
