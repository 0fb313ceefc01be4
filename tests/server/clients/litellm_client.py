"""Chat completions through litellm, which other clients (aider, agents) are built on."""

import asyncio
import json
import os

from checks import HELLO, KEY, MODEL, URL, WEATHER, check, raises, run, skip, wait_idle

# It would fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
try:
    import litellm
except ImportError as error:
    skip(error)

litellm.suppress_debug_info = True
litellm.telemetry = False
ARGS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "messages": HELLO,
        "max_tokens": 12, "seed": 7, "num_retries": 0, "timeout": 300}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def ask(**more):
    return litellm.completion(**{**ARGS, **more})


@check
def an_answer_is_the_same_whole_and_streamed():
    whole = ask()
    content = whole.choices[0].message.content
    assert content and whole.usage.total_tokens > whole.usage.prompt_tokens > 0
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert rebuilt.choices[0].message.content == content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


@check
def many_answers_come_at_once():
    async def together():
        return await asyncio.gather(*[litellm.acompletion(**ARGS) for _ in range(6)])

    answers = asyncio.run(together())
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@check
def a_tool_is_called():
    answer = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")
    sent = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    answer = ask(messages=[*HELLO, sent, result], tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content


@check
def an_answer_has_the_form_that_is_asked_for():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    answer = ask(response_format=schema, max_tokens=300, temperature=0)
    assert json.loads(answer.choices[0].message.content)["town"] in ("Rome", "Oslo")


@check
def errors_have_their_types():
    raises(litellm.BadRequestError, 400, lambda: ask(temperature=-1))
    long = [{"role": "user", "content": "word " * 20_000}]
    raises(litellm.ContextWindowExceededError, 400, lambda: ask(messages=long))
    raises(litellm.AuthenticationError, 401, lambda: ask(api_key="wrong"))


@check
def a_stream_that_is_left_frees_its_slot():
    async def leave():
        args = {**ARGS, "max_tokens": -1, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = await litellm.acompletion(**args)
        async for _ in stream:
            break
        await stream.completion_stream.response.aclose()

    asyncio.run(leave())
    wait_idle()


@check
def messages_in_the_form_of_anthropic():
    args = {"model": f"anthropic/{MODEL}", "api_base": URL, "drop_params": True, "temperature": 0}
    content = ask(**args).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(**args, stream=True)]
    assert content and "".join(parts) == content
    answer = ask(**args, tools=[TOOL], tool_choice="required", max_tokens=200)
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")


run()
