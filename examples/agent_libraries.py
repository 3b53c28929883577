"""The calculator's agent by two libraries, as ``environment.use = "agent_libraries.py:by_openai_agents"``.

It needs `pip install openai-agents`, and `by_smolagents` needs `pip install "smolagents[openai]"`. Both find the policy
in the environment variables of their rollout (docs/agents.md).
"""

import os


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def by_openai_agents(prompt: str) -> str:
    """Answer by OpenAI's Agents SDK."""
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)  # traces go to OpenAI's servers
    set_default_openai_api("chat_completions")  # by responses, the SDK fails where an answer was cut off
    agent = Agent("calculator", instructions="Add.", tools=[function_tool(add)], model=os.environ["OPENAI_MODEL"])
    return str((await Runner.run(agent, prompt, max_turns=4)).final_output)


def by_smolagents(prompt: str) -> str:
    """Answer by smolagents, over chat completions; it forces calls of tools where nothing else is said."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(
        os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        tool_choice="auto",
    )
    agent = ToolCallingAgent([tool(add)], model, max_steps=4, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Call add, and then final_answer."  # the library's own has 4,000 letters
    return str(agent.run(prompt))
