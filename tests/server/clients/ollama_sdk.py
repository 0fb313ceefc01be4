"""Ollama's routes through the ollama package."""

import json

from checks import HELLO, KEY, MODEL, URL, WEATHER, check, raises, run, skip, wait_idle

try:
    import ollama
except ImportError as error:
    skip(error)

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
OPTIONS = {"temperature": 0, "num_predict": 12, "num_ctx": 8192}
ARGS = {"model": MODEL, "messages": HELLO, "options": OPTIONS}


def ask(**more):
    return client.chat(**{**ARGS, **more})


@check
def an_answer_has_its_figures():
    answer = ask()
    assert (answer.model, answer.done) == (MODEL, True)
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.done_reason in ("stop", "length")
    assert 1 <= answer.eval_count <= 12 and answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0


@check
def a_stream_is_the_whole_answer():
    whole = ask()
    parts = list(ask(stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


@check
def a_text_is_generated():
    chat = ask().message.content
    answer = client.generate(model=MODEL, prompt=HELLO[0]["content"], options=OPTIONS)
    assert answer.response == chat
    parts = client.generate(model=MODEL, prompt=HELLO[0]["content"], options=OPTIONS, stream=True)
    assert "".join(part.response for part in parts) == chat
    raw = client.generate(model=MODEL, prompt="The package", raw=True, options=OPTIONS)
    assert raw.response and raw.response != chat


@check
def a_form_is_kept():
    answer = ask(format=WEATHER, options={**OPTIONS, "num_predict": 100})
    assert json.loads(answer.message.content)["town"] in ("Rome", "Oslo"), answer
    assert ask(format="json").message.content.lstrip().startswith("{")


@check
def a_tool_may_be_called():
    def weather(town: str) -> str:
        """The weather of a town.

        Args:
            town: Its name.
        """
        return town

    answer = ask(tools=[weather], options={**OPTIONS, "num_predict": 80})
    for call in answer.message.tool_calls or []:
        assert isinstance(call.function.arguments, dict), call
    history = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "weather", "arguments": {"town": "Rome"}}}]},
        {"role": "tool", "content": "Sunny.", "tool_name": "weather"}]
    assert ask(messages=history, tools=[weather]).message.content is not None


@check
def tokens_have_probabilities():
    answer = ask(logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) >= 1 and answer.logprobs[0].logprob <= 0
    assert len(answer.logprobs[0].top_logprobs) == 2


@check
def the_model_is_listed_and_shown():
    listed = client.list().models
    assert [model.model for model in listed] == [MODEL]
    assert listed[0].size > 0 and listed[0].modified_at.year >= 2000
    shown = client.show(MODEL)
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] > 0
    assert "completion" in shown.capabilities and shown.details.format == "gguf"
    assert [model.model for model in client.ps().models] == [MODEL]


@check
def texts_have_embeddings():
    both = client.embed(model=MODEL, input=["Hello", "there"])
    assert len(both.embeddings) == 2 and both.prompt_eval_count > 0, both
    assert client.embed(model=MODEL, input="Hello").embeddings[0] == both.embeddings[0]
    assert len(client.embeddings(model=MODEL, prompt="Hello").embedding) == len(both.embeddings[0])


@check
def errors_have_a_text():
    error = raises(ollama.ResponseError, 400, lambda: ask(options={"temperature": "hot"}))
    assert "options.temperature" in error.error, error
    raises(ollama.ResponseError, 404, lambda: client.show("none"))
    raises(ollama.ResponseError, 501, lambda: client.pull(MODEL))


@check
def a_client_that_goes_frees_its_slot():
    stream = ask(stream=True, options={"num_predict": -1, "ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_idle()


run()
