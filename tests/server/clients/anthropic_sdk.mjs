// Messages through the package of Anthropic.

import assert from "node:assert/strict";
import { HELLO, KEY, MODEL, URL, WEATHER, need, rejects, run, waitIdle } from "./checks.mjs";

const { Anthropic } = need("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const ARGS = { model: MODEL, messages: HELLO, max_tokens: 12, temperature: 0 };
const TOOL = { name: "weather", input_schema: WEATHER };

const ask = (more = {}) => client.messages.create({ ...ARGS, ...more });

await run({
  async aStreamIsTheWholeAnswer() {
    const whole = await ask();
    assert.equal(whole.content[0].type, "text");
    const stream = client.messages.stream(ARGS);
    let joined = "";
    stream.on("text", (delta) => (joined += delta));
    const final = await stream.finalMessage();
    assert.equal(joined, whole.content[0].text);
    assert.equal(final.stop_reason, whole.stop_reason);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  },

  async aToolIsCalled() {
    const choice = { type: "any", disable_parallel_tool_use: true };
    const args = { tools: [TOOL], tool_choice: choice, max_tokens: 200 };
    const answer = await ask(args);
    assert.equal(answer.stop_reason, "tool_use");
    const call = answer.content.at(-1);
    assert(["Rome", "Oslo"].includes(call.input.town));
    const streamed = await client.messages.stream({ ...ARGS, ...args }).finalMessage();
    assert.deepEqual(streamed.content.at(-1).input, call.input);
    const result = { type: "tool_result", tool_use_id: call.id, content: "Sunny." };
    const messages = [
      ...HELLO,
      { role: "assistant", content: answer.content },
      { role: "user", content: [result] },
    ];
    assert.equal((await ask({ messages, tools: [TOOL] })).type, "message");
  },

  async tokensAreCounted() {
    const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: HELLO });
    const { usage } = await ask();
    assert.equal(input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
  },

  async errorsHaveTheirTypes() {
    await rejects(ask({ temperature: -1 }), Anthropic.BadRequestError, 400);
    const wrong = new Anthropic({ baseURL: URL, apiKey: "wrong", maxRetries: 0 });
    await rejects(wrong.messages.create(ARGS), Anthropic.AuthenticationError, 401);
  },

  async anAbortedStreamFreesItsSlot() {
    const stream = await ask({ max_tokens: 3000, ignore_eos: true, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
    await waitIdle();
  },
});
