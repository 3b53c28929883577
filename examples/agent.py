"""An agent with OpenAI's client and a calculator: `gnomon train examples/agent.toml`, in a few minutes on two cores.

It calls the policy as it would call a hosted model; its calls become the tokens that are trained on (docs/agents.md).
"""

import json

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


async def solve(prompt: str) -> str:
    """Answer a question; the policy may call the calculator."""
    messages = [{"role": "user", "content": f"{prompt} Use the tool."}]
    async with openai.AsyncOpenAI() as client:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            said = reply.choices[0].message
            if not said.tool_calls:
                return said.content or ""
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"]) if {"a", "b"} <= given.keys() else "error: it needs a and b"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
