"""Chat completions, completions and models through the openai package."""

import asyncio
import json
from typing import Literal

from checks import HELLO, KEY, MODEL, URL, WEATHER, check, raises, run, skip, wait_idle

try:
    import openai
    from pydantic import BaseModel
except ImportError as error:
    skip(error)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a town.", "parameters": WEATHER}}
TIME = {"type": "function", "function": {
    "name": "time", "parameters": {"type": "object", "properties": {},
                                   "additionalProperties": False}}}


def ask(**more):
    args = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 7, **more}
    return client.chat.completions.create(**args)


def text(**more):
    return ask(**more).choices[0].message.content


@check
def models_are_listed():
    assert MODEL in [model.id for model in client.models.list()]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "moeba")
    error = raises(openai.NotFoundError, 404, lambda: client.models.retrieve("none"))
    assert error.code == "model_not_found", error


@check
def an_answer_has_its_figures():
    answer = ask()
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert (answer.model, choice.message.role) == (MODEL, "assistant")
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 12
    again = ask()
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert answer._request_id.startswith("req_")
    assert answer.system_fingerprint == again.system_fingerprint


@check
def a_seed_repeats_an_answer():
    assert text() == text()
    assert len({text(seed=seed) for seed in range(6)}) > 1
    reported = ask(seed=openai.NOT_GIVEN).moeba["seed"]
    assert text(seed=reported) == text(seed=reported)


@check
def a_stream_is_the_whole_answer():
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len([part for part in parts if part]) > 1
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@check
def the_stream_helper_gathers_an_answer():
    # An answer that its length cuts is an exception of this helper.
    word = text().split()[2]
    args = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 7, "stop": word}
    with client.chat.completions.stream(**args) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] == "content.done", kinds
    assert final.choices[0].message.content == text(stop=word)


@check
def a_choice_is_the_answer_of_its_seed():
    choices = ask(n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [c.message.content for c in choices] == [text(seed=7 + i) for i in range(3)]
    parts = ["", "", ""]
    for chunk in ask(n=3, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == [choice.message.content for choice in choices]


@check
def a_stop_string_ends_an_answer():
    whole = text()
    word = whole.split()[2]
    choice = ask(stop=word).choices[0]
    assert choice.message.content == whole[:whole.index(word)]
    assert choice.finish_reason == "stop"
    assert text(stop=["\u0001", word]) == choice.message.content


@check
def log_probabilities_belong_to_the_text():
    args = {"logprobs": True, "top_logprobs": 3}
    choice = ask(**args).choices[0]
    tokens = choice.logprobs.content
    written = b"".join(bytes(token.bytes) for token in tokens)
    assert written.decode() == choice.message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob
    streamed = []
    for chunk in ask(**args, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content if logprobs else []
    assert streamed == tokens
    raises(openai.BadRequestError, 400, lambda: ask(top_logprobs=2))


class Report(BaseModel):
    is_done: bool
    kind: Literal["bug", "feature"]
    place: Literal["server", "engine"] | None


@check
def an_answer_is_parsed_into_a_class():
    args = {"model": MODEL, "messages": HELLO, "max_tokens": 600, "seed": 7, "temperature": 0}
    answer = client.chat.completions.parse(**args, response_format=Report)
    assert isinstance(answer.choices[0].message.parsed, Report), answer
    with client.chat.completions.stream(**args, response_format=Report) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    answer = client.chat.completions.create(**args, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.lstrip().startswith("{")


@check
def a_tool_is_called():
    for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
        answer = ask(tools=[TIME, TOOL], tool_choice=choice, max_tokens=120, temperature=0,
                     parallel_tool_calls=False)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls", answer
        assert len(message.tool_calls) == 1 and message.content is None
        call = message.tool_calls[0]
        assert call.type == "function" and call.id
        arguments = json.loads(call.function.arguments)
        if choice != "required":
            assert call.function.name == "weather" and arguments["town"] in ("Rome", "Oslo")
    allowed = {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}}
    answer = ask(tools=[TIME, TOOL], tool_choice=allowed, max_tokens=120, temperature=0,
                 parallel_tool_calls=False)
    assert answer.choices[0].message.tool_calls[0].function.name == "time"
    for choice in ["none", "auto", openai.NOT_GIVEN]:
        message = ask(tools=[TIME, TOOL], tool_choice=choice).choices[0].message
        assert message.content or message.tool_calls
        assert choice != "none" or not message.tool_calls


@check
def a_streamed_call_is_the_whole_one():
    args = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120,
            "parallel_tool_calls": False}
    call = ask(**args).choices[0].message.tool_calls[0]
    names, arguments, ids, reason = "", "", [], None
    for chunk in ask(**args, stream=True):
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or []:
            assert delta.index == 0
            ids += [delta.id] if delta.id else []
            names += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (ids, names, arguments) == ([call.id], "weather", call.function.arguments)
    assert reason == "tool_calls"


@check
def several_calls_have_their_own_ids():
    """With several tools the model may call as often as it likes; whatever is whole is valid."""
    n_several = 0
    for seed in range(3):
        answer = ask(tools=[TOOL, TIME], tool_choice="required", parallel_tool_calls=True,
                     max_tokens=150, seed=seed)
        choice = answer.choices[0]
        calls = choice.message.tool_calls
        n_several += len(calls) > 1
        assert len({call.id for call in calls}) == len(calls)
        whole = calls[:-1] if choice.finish_reason == "length" else calls
        for call in whole:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "time" or arguments["town"] in ("Rome", "Oslo")
    assert n_several > 0, "no answer has two calls"


@check
def a_result_goes_back():
    class Weather(BaseModel):
        """The weather of a town."""
        town: Literal["Rome", "Oslo"]

    tool = openai.pydantic_function_tool(Weather)
    args = {"model": MODEL, "tools": [tool], "seed": 7, "max_tokens": 120, "temperature": 0}
    answer = client.chat.completions.parse(
        **args, messages=HELLO, tool_choice="required", parallel_tool_calls=False)
    message = answer.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    sent = message.model_dump(exclude_none=True)
    messages = [*HELLO, sent, {"role": "tool", "tool_call_id": message.tool_calls[0].id,
                               "content": [{"type": "text", "text": "Sunny."}]}]
    args["max_tokens"] = 6
    answer = client.chat.completions.create(**args, messages=messages, tool_choice="none")
    assert answer.choices[0].message.content


@check
def texts_have_embeddings():
    one = client.embeddings.create(model=MODEL, input="Hello")
    both = client.embeddings.create(model=MODEL, input=["Hello", "there"], encoding_format="float")
    assert [item.index for item in both.data] == [0, 1], both
    pairs = zip(one.data[0].embedding, both.data[0].embedding, strict=True)
    assert all(abs(a - b) < 1e-6 for a, b in pairs), both
    assert one.usage.prompt_tokens == one.usage.total_tokens > 0, one.usage
    short = client.embeddings.create(model=MODEL, input="Hello", dimensions=4)
    assert len(short.data[0].embedding) == 4, short


@check
def errors_have_their_types():
    error = raises(openai.BadRequestError, 400, lambda: ask(temperature=-1))
    assert (error.param, error.type) == ("temperature", "invalid_request_error")
    assert isinstance(error.code, str) and error.request_id.startswith("req_")
    for is_stream in [False, True]:
        long = [{"role": "user", "content": "word " * 20_000}]
        error = raises(openai.BadRequestError, 400, lambda: ask(messages=long, stream=is_stream))
        assert error.code == "context_length_exceeded", error.body
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}
    raises(openai.BadRequestError, 400, lambda: ask(response_format=bad))
    image = [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]
    raises(openai.BadRequestError, 400, lambda: ask(messages=image))
    embed = lambda **more: client.embeddings.create(model=MODEL, **more)
    raises(openai.BadRequestError, 400, lambda: embed(input=[]))
    raises(openai.BadRequestError, 400, lambda: embed(input="x", dimensions=10**6))
    wrong = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, 401, lambda: wrong.models.list())
    lost = openai.OpenAI(base_url=f"{URL}/v2", api_key=KEY, max_retries=0)
    raises(openai.NotFoundError, 404, lambda: lost.models.list())


@check
def a_closed_stream_frees_its_slot():
    for _ in range(3):
        stream = ask(max_tokens=-1, stream=True, extra_body={"ignore_eos": True})
        for _, _ in zip(range(3), stream):
            pass
        stream.close()
        wait_idle()


@check
def many_at_once_are_as_one_by_one():
    alone = [text(seed=seed) for seed in range(12)]

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as many:
            create = many.chat.completions.create
            args = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
            return await asyncio.gather(*[create(**args, seed=seed) for seed in range(12)])

    answers = asyncio.run(together())
    assert [answer.choices[0].message.content for answer in answers] == alone


@check
def plain_text_is_continued():
    args = {"model": MODEL, "prompt": "The package", "max_tokens": 6, "seed": 7}
    answer = client.completions.create(**args, logprobs=2)
    whole = answer.choices[0]
    assert answer.object == "text_completion" and whole.text
    assert "".join(whole.logprobs.tokens) == whole.text
    assert len(whole.logprobs.top_logprobs[0]) >= 2
    parts = [c.choices[0].text for c in client.completions.create(**args, stream=True)]
    assert "".join(parts) == whole.text
    args["prompt"] = ["The package", "The file"]
    answer = client.completions.create(**args, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == "The package" + whole.text


@check
def other_fields_go_through():
    more = {"top_k": 1, "min_p": 0.1, "repeat_penalty": 1.0, "grammar": 'root ::= "yes" | "no"'}
    assert text(extra_body=more) in ("yes", "no")
    assert text(extra_body={"reasoning_format": "none"}, user="me", metadata={"a": "b"},
                store=False, service_tier="auto", reasoning_effort="low")


run()
