"""Messages through the anthropic package."""

from checks import HELLO, KEY, MODEL, URL, WEATHER, check, raises, run, skip, wait_idle

try:
    import anthropic
except ImportError as error:
    skip(error)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
TOOL = {"name": "weather", "description": "The weather of a town.", "input_schema": WEATHER}
# The package no longer knows `temperature`.
ARGS = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": {"temperature": 0}}


def ask(**more):
    return client.messages.create(**{**ARGS, **more})


@check
def an_answer_has_its_figures():
    answer = ask()
    assert answer.id.startswith("msg_") and (answer.type, answer.role) == ("message", "assistant")
    assert answer.model == MODEL
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 1 <= answer.usage.output_tokens <= 12
    again = ask().usage
    assert again.cache_read_input_tokens > 0
    both = [u.input_tokens + (u.cache_read_input_tokens or 0) for u in (answer.usage, again)]
    assert both[0] == both[1], both


@check
def a_stream_is_the_whole_answer():
    whole = ask()
    kinds = [event.type for event in ask(stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    with client.messages.stream(**ARGS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def tokens_are_counted_as_they_are_used():
    for more in [{}, {"system": "Be short."}, {"tools": [TOOL]}]:
        args = {key: value for key, value in {**ARGS, **more}.items()
                if key in ("model", "messages", "system", "tools")}
        counted = client.messages.count_tokens(**args).input_tokens
        usage = ask(**more).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), more


@check
def a_stop_sequence_ends_an_answer():
    whole = ask().content[0].text
    word = whole.split()[2]
    answer = ask(stop_sequences=[word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].text == whole[:whole.index(word)]


@check
def system_texts_and_blocks_are_read():
    plain = ask(system="Be short.")
    blocks = ask(system=[{"type": "text", "text": "Be short.",
                          "cache_control": {"type": "ephemeral"}}],
                 messages=[{"role": "user", "content": [
                     {"type": "text", "text": HELLO[0]["content"]}]}])
    assert plain.content == blocks.content


@check
def a_tool_is_called():
    for choice in [{"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]:
        args = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
        answer = ask(**args)
        assert answer.stop_reason == "tool_use", answer
        call = answer.content[-1]
        assert (call.type, call.name) == ("tool_use", "weather")
        assert call.input["town"] in ("Rome", "Oslo") and call.id
        with client.messages.stream(**{**ARGS, **args}) as stream:
            kinds = [getattr(event, "delta", None) for event in stream]
            final = stream.get_final_message()
        assert any(getattr(delta, "type", "") == "input_json_delta" for delta in kinds)
        assert final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    messages = [*HELLO, {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result, {"type": "text", "text": "Is it warm?"}]}]
    answer = ask(messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]
    assert ask(tools=[TOOL], tool_choice={"type": "auto"}).content


@check
def an_answer_is_continued():
    whole = ask().content[0].text
    begun, rest = whole.split(" ", 1)
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    assert ask(messages=messages).content[0].text.strip().startswith(rest.split()[0])


@check
def errors_have_their_types():
    error = raises(anthropic.BadRequestError, 400, lambda: ask(extra_body={"temperature": -1}))
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"
    long = [{"role": "user", "content": "word " * 20_000}]
    error = raises(anthropic.BadRequestError, 400, lambda: ask(messages=long))
    assert "prompt is too long" in str(error), error
    raises(anthropic.BadRequestError, 400, lambda: ask(messages=[]))
    raises(anthropic.BadRequestError, 400, lambda: ask(tools=[TOOL], tool_choice={
        "type": "tool", "name": "none"}))
    wrong = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    error = raises(anthropic.AuthenticationError, 401, lambda: wrong.messages.create(**ARGS))
    assert error.body["error"]["type"] == "authentication_error"


@check
def a_token_works_as_a_key():
    by_token = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert by_token.messages.create(**ARGS).content == ask().content


@check
def a_closed_stream_frees_its_slot():
    for _ in range(3):
        stream = ask(max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        for _, _ in zip(range(3), stream):
            pass
        stream.close()
        wait_idle()


run()
