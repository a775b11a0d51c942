// openai for Node against a server over the toy model: `tests/serve/run`. Arguments: the toy, the folder with node_modules.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { createInterface } from "node:readline";

const folder = resolve(process.argv[3]);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const { version } = JSON.parse(readFileSync(`${folder}/node_modules/openai/package.json`));

const messages = [{ role: "user", content: "Hi" }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Ulm", "Jena"] } },
  required: ["city"],
  additionalProperties: false,
};
const model = "toy";

async function chats(client) {
  const { completions } = client.chat;
  const asked = { model, messages, max_tokens: 9, seed: 1, temperature: 0 };
  const whole = await completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
  assert.equal(whole.choices[0].logprobs.content[0].top_logprobs.length, 2);
  let [text, usage] = ["", null];
  for await (const piece of await completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
    text += piece.choices[0]?.delta.content ?? "";
    usage = piece.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, 9);
  const format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
  const held = await completions.parse({ model, messages, response_format: format });
  assert.ok(schema.properties.city.enum.includes(JSON.parse(held.choices[0].message.content).city));
  const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
  const called = { model, messages, tools, tool_choice: "required", seed: 3 };
  const { message, finish_reason } = (await completions.create(called)).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.tool_calls[0].function.name, "weather");
  const streamed = await completions.stream(called).finalChatCompletion();
  const args = (answer) => answer.tool_calls.map((call) => call.function.arguments);
  assert.deepEqual(args(streamed.choices[0].message), args(message));
  // A client that leaves in the middle.
  const left = await completions.create({ ...asked, max_tokens: 1000, ignore_eos: true, stream: true });
  for await (const _ of left) break;
}

async function others(client) {
  const asked = { model, input: "Hi", max_output_tokens: 9, temperature: 0 };
  const whole = await client.responses.create(asked);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.ok(text.length > 0);
  assert.equal(text, whole.output_text);
  const several = await client.completions.create({ model, prompt: ["a", "b"], n: 2, max_tokens: 4, guided_choice: ["xy"] });
  assert.deepEqual(several.choices.map((choice) => choice.text), ["xy", "xy", "xy", "xy"]);
  const names = [];
  for await (const found of client.models.list()) names.push(found.id);
  assert.deepEqual(names, [model]);
  await assert.rejects(client.completions.create({ model: "other", prompt: "a" }), OpenAI.NotFoundError);
  const wrong = client.completions.create({ model, prompt: "a", temperature: -1 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  const stranger = new OpenAI({ baseURL: client.baseURL, apiKey: "no", maxRetries: 0 });
  await assert.rejects(stranger.models.list().then(() => {}), OpenAI.AuthenticationError);
}

const server = spawn(process.argv[2], { stdio: ["pipe", "pipe", "inherit"] });
const ended = new Promise((resolve) => server.on("exit", resolve));
try {
  const lines = createInterface({ input: server.stdout });
  const url = await new Promise((resolve) => lines.once("line", resolve));
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "key", maxRetries: 0 });
  await chats(client);
  await others(client);
  console.log(`openai for Node ${version}: ok`);
} finally {
  server.stdin.end();
  await ended;
}
