// A request to the model, and its answer as it comes.

import { stream } from "./api.js";
import { fields, values } from "./settings.js";

/** Messages as the API takes them. */
function asked(messages) {
  const system = (values.system ?? "").trim();
  const own = messages.map(({ role, content, reasoning, calls, call_id }) => {
    const message = { role, content };
    if (reasoning) {
      message.reasoning_content = reasoning;
    }
    if (calls?.length) {
      message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    if (call_id) {
      message.tool_call_id = call_id;
    }
    return message;
  });
  return system ? [{ role: "system", content: system }, ...own] : own;
}

/** Bytes of tokens to text: a character may have several tokens. */
function reader() {
  const decoder = new TextDecoder();
  return (entry) => ({
    text: entry.bytes ? decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token,
    logprob: entry.logprob,
    top: entry.top_logprobs.map(({ token, logprob }) => [token, logprob]),
  });
}

function addCalls(message, parts) {
  for (const part of parts) {
    message.calls ??= [];
    message.calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" };
    message.calls[part.index].arguments += part.function.arguments ?? "";
  }
}

async function chat(model, messages, message, signal, changed) {
  const body = { model, messages: asked(messages), stream: true, stream_options: { include_usage: true }, ...fields(true) };
  const read = reader();
  for await (const piece of stream("/v1/chat/completions", body, signal)) {
    const choice = piece.choices[0];
    message.content += choice?.delta.content ?? "";
    message.reasoning = (message.reasoning ?? "") + (choice?.delta.reasoning_content ?? "");
    addCalls(message, choice?.delta.tool_calls ?? []);
    const entries = choice?.logprobs?.content ?? [];
    if (entries.length > 0) {
      (message.tokens ??= []).push(...entries.map(read));
    }
    end(message, piece);
    changed();
  }
}

/** A model without a chat template continues what stands there. */
async function text(model, messages, message, signal, changed) {
  const prompt = messages.map(({ content }) => content).join("");
  const body = { model, prompt, max_tokens: 128, stream: true, stream_options: { include_usage: true }, ...fields(false) };
  for await (const piece of stream("/v1/completions", body, signal)) {
    const choice = piece.choices[0];
    message.content += choice?.text ?? "";
    const found = choice?.logprobs;
    found?.tokens.forEach((token, at) => {
      const top = Object.entries(found.top_logprobs[at] ?? {});
      (message.tokens ??= []).push({ text: token, logprob: found.token_logprobs[at], top });
    });
    end(message, piece);
    changed();
  }
}

function end(message, piece) {
  const reason = piece.choices[0]?.finish_reason;
  if (reason) {
    message.ended = reason;
  }
  if (piece.usage && piece.timings) {
    message.usage = {
      prompt: piece.usage.prompt_tokens,
      cached: piece.usage.prompt_tokens_details.cached_tokens,
      written: piece.usage.completion_tokens,
      rate: piece.timings.predicted_per_second,
      first: (piece.timings.queue_ms + piece.timings.prompt_ms) / 1000,
    };
  }
}

/** Writes the answer to `messages` into `message`; `changed` is called after each piece. */
export async function answer(model, isChat, messages, message, signal, changed) {
  try {
    await (isChat ? chat : text)(model, messages, message, signal, changed);
  } catch (error) {
    if (signal.aborted) {
      message.ended = "stopped";
    } else {
      message.error = error.message;
    }
  }
}
