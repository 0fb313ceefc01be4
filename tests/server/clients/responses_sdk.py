"""Responses through the openai package."""

import json
from typing import Literal

from checks import KEY, MODEL, URL, WEATHER, check, raises, run, skip, wait_idle

try:
    import openai
    from pydantic import BaseModel
except ImportError as error:
    skip(error)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
TOOL = {"type": "function", "name": "weather", "description": "The weather of a town.",
        "parameters": WEATHER, "strict": True}
QUESTION = "What is a branch?"


def ask(**more):
    args = {"model": MODEL, "input": QUESTION, "max_output_tokens": 12, "temperature": 0, **more}
    return client.responses.create(**args)


@check
def an_answer_has_its_figures():
    answer = ask()
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert answer.output[0].type == "message" and answer.output[0].id.startswith("msg_")
    assert answer.output_text and answer.status in ("completed", "incomplete")
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens"
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert ask().usage.input_tokens_details.cached_tokens > 0


@check
def a_stream_is_the_whole_answer():
    whole = ask()
    events = list(ask(stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    done = [event.text for event in events if event.type == "response.output_text.done"]
    assert text == whole.output_text and done == [text]
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


@check
def messages_and_instructions_are_read():
    parts = [{"type": "input_text", "text": QUESTION}]
    for form in [[{"role": "user", "content": QUESTION}],
                 [{"type": "message", "role": "user", "content": parts}]]:
        assert ask(input=form).output_text == ask().output_text
    # Instructions come before the messages.
    short = ask(instructions="Be short.")
    assert short.usage.input_tokens > ask().usage.input_tokens
    answer = ask()
    turns = [{"role": "user", "content": QUESTION}, *answer.output,
             {"role": "user", "content": "And a tag?"}]
    assert ask(input=turns).output_text


class Report(BaseModel):
    is_done: bool
    kind: Literal["bug", "feature"]


@check
def an_answer_is_parsed_into_a_class():
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Report,
                                    max_output_tokens=600, temperature=0)
    assert isinstance(answer.output_parsed, Report), answer
    # An answer that its length cuts is an exception of this helper.
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Report,
                                 max_output_tokens=600, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


@check
def a_tool_is_called():
    for choice in ["required", {"type": "function", "name": "weather"}]:
        args = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 200,
                "parallel_tool_calls": False}
        answer = ask(**args)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert len(calls) == 1 and answer.status == "completed", answer
        call = calls[0]
        assert call.name == "weather" and call.call_id
        assert json.loads(call.arguments)["town"] in ("Rome", "Oslo")
        events = list(ask(**args, stream=True))
        kind = "response.function_call_arguments"
        parts = [event.delta for event in events if event.type == f"{kind}.delta"]
        done = [event.arguments for event in events if event.type == f"{kind}.done"]
        assert "".join(parts) == call.arguments and done == [call.arguments]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    turns = [{"role": "user", "content": QUESTION}, *answer.output, result]
    assert ask(input=turns, tools=[TOOL], tool_choice="none").output_text


@check
def errors_have_their_types():
    raises(openai.BadRequestError, 400, lambda: ask(temperature=-1))
    error = raises(openai.BadRequestError, 400, lambda: ask(input="word " * 20_000))
    assert error.code == "context_length_exceeded", error.body
    raises(openai.BadRequestError, 400, lambda: ask(previous_response_id="resp_x"))
    raises(openai.BadRequestError, 400, lambda: ask(input=[{"role": "nobody", "content": "x"}]))


@check
def tokens_are_counted():
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert counted.input_tokens == ask().usage.input_tokens


@check
def a_closed_stream_frees_its_slot():
    for _ in range(3):
        stream = ask(max_output_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        for _, _ in zip(range(5), stream):
            pass
        stream.close()
        wait_idle()


run()
