// Chat completions through the openai package.

import assert from "node:assert/strict";
import { HELLO, KEY, MODEL, URL, WEATHER, need, rejects, run, waitIdle } from "./checks.mjs";

const { OpenAI } = need("openai");
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const ARGS = { model: MODEL, messages: HELLO, max_tokens: 12, seed: 7 };
const TOOL = { type: "function", function: { name: "weather", parameters: WEATHER } };

const ask = (more = {}) => client.chat.completions.create({ ...ARGS, ...more });
const text = async (more) => (await ask(more)).choices[0].message.content;

await run({
  async modelsAreListed() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    assert(ids.includes(MODEL));
    await rejects(client.models.retrieve("none"), OpenAI.NotFoundError, 404);
  },

  async aStreamIsTheWholeAnswer() {
    const whole = await text();
    assert.equal(await text(), whole);
    let joined = "";
    let usage = null;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await ask(options)) {
      joined += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(joined, whole);
    assert(usage.completion_tokens >= 1 && usage.completion_tokens <= 12);
  },

  async theStreamHelperGathersAnAnswer() {
    const stream = client.chat.completions.stream({ ...ARGS });
    let joined = "";
    stream.on("content", (delta) => (joined += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(joined, final.choices[0].message.content);
  },

  async choicesHaveTheirSeeds() {
    const { choices } = await ask({ n: 3 });
    for (const [i, choice] of choices.entries()) {
      assert.equal(choice.message.content, await text({ seed: 7 + i }));
    }
  },

  async anAnswerIsParsed() {
    const schema = { name: "x", strict: true, schema: WEATHER };
    const format = { type: "json_schema", json_schema: schema };
    const answer = await text({ response_format: format, max_tokens: 400, temperature: 0 });
    assert(["Rome", "Oslo"].includes(JSON.parse(answer).town));
  },

  async aToolIsCalled() {
    const more = { tool_choice: "required", parallel_tool_calls: false, max_tokens: 150 };
    const args = { tools: [TOOL], ...more };
    const { message, finish_reason } = (await ask(args)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    const [call] = message.tool_calls;
    assert(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).town));
    const streamed = await client.chat.completions.stream({ ...ARGS, ...args }).finalMessage();
    assert.equal(streamed.tool_calls[0].function.arguments, call.function.arguments);
    assert.equal(streamed.tool_calls[0].id, call.id);
    const result = { role: "tool", tool_call_id: call.id, content: "Sunny." };
    const messages = [...HELLO, message, result];
    assert(await text({ messages, tools: [TOOL], tool_choice: "none" }));
  },

  async logProbabilitiesBelongToTheText() {
    const choice = (await ask({ logprobs: true, top_logprobs: 2 })).choices[0];
    const joined = choice.logprobs.content.map((token) => token.token).join("");
    assert.equal(joined, choice.message.content);
  },

  async errorsHaveTheirTypes() {
    const error = await rejects(ask({ temperature: -1 }), OpenAI.BadRequestError, 400);
    assert.equal(error.param, "temperature");
    const messages = [{ role: "user", content: "word ".repeat(20_000) }];
    const long = await rejects(ask({ messages, stream: true }), OpenAI.BadRequestError, 400);
    assert.equal(long.code, "context_length_exceeded");
    const wrong = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "wrong", maxRetries: 0 });
    await rejects(wrong.chat.completions.create(ARGS), OpenAI.AuthenticationError, 401);
  },

  async anAbortedStreamFreesItsSlot() {
    const stream = await ask({ max_tokens: -1, ignore_eos: true, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
    await waitIdle();
  },
});
