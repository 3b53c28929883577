"""An agent with OpenAI's client and a calculator: `gnomon train examples/agent.toml`.

It calls the policy as it would call a hosted model; its calls become the tokens that are trained on (docs/agents.md).
"""

import json

import openai

from gnomon.tasks.environment import Reply

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


SYSTEM = """Call the tool to add. For 2+3= write:
<tool_call>
{"name": "add", "arguments": {"a": 2, "b": 3}}
</tool_call>"""


async def solve(prompt: str, answer: str) -> Reply:
    """Answer a question; a call of the calculator that fits the question earns half of the reward."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    earned = 0.0
    async with openai.AsyncOpenAI() as client:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            said = reply.choices[0].message
            if not said.tool_calls:
                earned += 0.5 * (answer in (said.content or ""))
                return Reply(said.content or "", reward=earned)
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                numbers = [json.loads(call.function.arguments).get(name) for name in ("a", "b")]
                is_right = call.function.name == "add" and all(isinstance(number, int | float) for number in numbers)
                result = str(sum(numbers)) if is_right else "error: add needs the numbers a and b"
                earned = max(earned, 0.1 * is_right + 0.4 * (result == answer))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
