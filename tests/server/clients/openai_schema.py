"""Every answer and every chunk against OpenAI's own types, read strictly.

The types are those of the openai package, which let unknown fields pass; those that the server adds
are listed here, and no others may come. MOEBA_OPENAPI may name OpenAI's openapi.json: everything is
then checked by that document, too (package jsonschema).
"""

import json
import os
import urllib.request

from checks import HELLO, KEY, MODEL, URL, WEATHER, check, has, http, run, skip

try:
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import BaseModel, TypeAdapter
except ImportError as error:
    skip(error)

# Paths of fields that are not OpenAI's, [] standing for each of a list.
EXTRA = {
    "moeba", "timings", "choices[].message.reasoning", "choices[].message.reasoning_content",
    "choices[].delta.reasoning", "choices[].delta.reasoning_content", "prompt_progress",
    "status", "meta", "max_model_len", "context_length", "loaded_context_length", "architecture",
    "capabilities", "store",
         # Anthropic's members of the same list.
         "type", "display_name"}


def with_null(schema):
    """`nullable` is of an older OpenAPI: a validator would pass over it."""
    if isinstance(schema, list):
        return [with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_nullable = schema.get("nullable") is True
    plain = {key: with_null(value) for key, value in schema.items()
             if not (is_nullable and key == "nullable")}
    return {"anyOf": [plain, {"type": "null"}]} if is_nullable else plain


DOCUMENT = None
if path := os.environ.get("MOEBA_OPENAPI"):
    try:
        import jsonschema
    except ImportError as error:
        skip(error)
    with open(path) as file:
        DOCUMENT = with_null(json.load(file))


def unknown(value, path=""):
    """Paths of fields that the types do not have."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{path}.{name}".lstrip(".")
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item, f"{path}[]")


def conforms(data, kind, schema):
    """A value has OpenAI's form, by the package and by the document."""
    value = TypeAdapter(kind).validate_python(data, strict=True)
    extra = {path.removeprefix("response.") for path in unknown(value)} - EXTRA
    assert not extra, f"{extra} of {json.dumps(data)[:2000]}"
    by_document(data, schema)
    return value


def by_document(data, schema):
    if DOCUMENT is None:
        return
    # OpenAI's own responses have nulls here, which the document forgets.
    for part in [data, data.get("response") or {}]:
        for name in ["user", "usage"]:
            if name in part and part[name] is None and "output" in part:
                del part[name]
    root = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(root)
    errors = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(data)]
    assert not errors, f"{errors}\n{json.dumps(data)[:2000]}"


def frames(path, body):
    """The data of a stream's frames."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].strip()


def both(body):
    """The whole answer and all chunks of a chat."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 7, **body}
    status, data = http("/v1/chat/completions", body)
    assert status == 200, data
    whole = conforms(data, ChatCompletion, "CreateChatCompletionResponse")
    body |= {"stream": True}
    *chunks, end = frames("/v1/chat/completions", body)
    assert end == b"[DONE]"
    for chunk in chunks:
        conforms(json.loads(chunk), ChatCompletionChunk, "CreateChatCompletionStreamResponse")
    return whole, chunks


TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@check
def chats():
    both({})
    both({"n": 2, "stream_options": {"include_usage": True}})
    both({"logprobs": True, "top_logprobs": 2})
    both({"stop": "the", "timings_per_token": True, "return_progress": True})
    both({"response_format": {"type": "json_object"}, "max_tokens": 60})
    both({"max_tokens": 0})


@check
def calls():
    for parallel in [False, True]:
        whole, chunks = both({"tools": [TOOL], "tool_choice": "required", "max_tokens": 150,
                              "parallel_tool_calls": parallel})
        assert whole.choices[0].message.tool_calls
        assert any(b"tool_calls" in chunk for chunk in chunks)
    both({"tools": [TOOL], "tool_choice": "auto"})


@check
def completions():
    for more in [{}, {"logprobs": 2}, {"n": 2, "echo": True, "prompt": ["A", "B"]}]:
        body = {"model": MODEL, "prompt": "The package", "max_tokens": 6, "seed": 7, **more}
        status, data = http("/v1/completions", body)
        assert status == 200, data
        conforms(data, Completion, "CreateCompletionResponse")
        *chunks, end = frames("/v1/completions", body | {"stream": True})
        assert end == b"[DONE]"
        for chunk in map(json.loads, chunks):
            for choice in chunk["choices"]:
                # The types know no chunk that is not the last; OpenAI's own have null there.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            conforms(chunk, Completion, "CreateCompletionResponse")


@check
def models():
    data = http("/v1/models")[1]
    assert data["object"] == "list"
    for model in data["data"]:
        conforms(model, Model, "Model")
    by_document(data, "ListModelsResponse")


@check
def errors():
    bad = {"messages": HELLO}
    for path, body in [("/v1/chat/completions", {"messages": 5}), ("/v1/nothing", {}),
                       ("/v1/chat/completions", {**bad, "temperature": -1}),
                       ("/v1/completions", {"prompt": {}}), ("/v1/models/none", None)]:
        status, data = http(path, body)
        error = data["error"]
        assert status >= 400 and isinstance(error["message"], str), data
        assert isinstance(error["type"], str) and isinstance(error["code"], str), data
        by_document(data, "ErrorResponse")


def responses():
    for more in [{}, {"tools": [{"type": "function", "strict": True, **TOOL["function"]}],
                      "tool_choice": "required", "parallel_tool_calls": False}]:
        body = {"model": MODEL, "input": "What is a branch?", "max_output_tokens": 60,
                "temperature": 0.5, **more}
        status, data = http("/v1/responses", body)
        assert status == 200, data
        conforms(data, Response, "Response")
        events = [json.loads(frame) for frame in frames("/v1/responses", body | {"stream": True})]
        for event in events:
            conforms(event, ResponseStreamEvent, "ResponseStreamEvent")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


if has("/v1/responses"):
    check(responses)
run()
