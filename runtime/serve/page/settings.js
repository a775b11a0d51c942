// The panel of settings, and what they mean in a request.

import { key } from "./api.js";
import { el } from "./dom.js";
import { settings as stored } from "./store.js";

/** Numbers of a request by their fields; empty ones are the server's defaults. */
const NUMBERS = [
  ["temperature", "Temperature", 0, "any"],
  ["top_p", "top_p", 0, "any"],
  ["top_k", "top_k", 0, 1],
  ["min_p", "min_p", 0, "any"],
  ["max_tokens", "Most tokens", 1, 1],
  ["seed", "Seed", -1, 1],
];

export const values = stored.read();

const set = (name, value) => {
  values[name] = value;
  stored.write(values);
};

export function showTheme() {
  if (["light", "dark"].includes(values.theme)) {
    document.documentElement.dataset.theme = values.theme;
  } else {
    delete document.documentElement.dataset.theme;
  }
}

const text = (name, label, rows, hint = "") =>
  el("label", {}, label, el("textarea", {
    rows, spellcheck: false, placeholder: hint, name, value: values[name] ?? "", oninput: (event) => set(name, event.target.value),
  }));

/** Numbers of 32 bits have digits that nobody wrote. */
const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : "");

const number = (defaults) => ([name, label, min, step]) =>
  el("label", {}, label, el("input", {
    type: "number", min, step, name, value: values[name] ?? "", placeholder: short(defaults[name]),
    oninput: (event) => set(name, event.target.value),
  }));

/** Fills the panel. `defaults` are those of the model; `changed` is called with a new key. */
export function fill(panel, defaults, changed) {
  const theme = (name) => el("option", { value: name, selected: (values.theme ?? "auto") === name }, name);
  panel.replaceChildren(
    text("system", "System text", 3),
    el("div", { className: "pair" }, ...NUMBERS.map(number(defaults))),
    el("label", {}, "Alternatives of each token (0 to 20; hover over a token)", el("input", {
      type: "number", min: 0, max: 20, name: "alternatives", value: values.alternatives ?? 0,
      oninput: (event) => set("alternatives", event.target.value),
    })),
    text("schema", "JSON schema of answers", 4, '{"type": "object", ...}'),
    text("tools", "Tools (a JSON list)", 4, '[{"type": "function", "function": {"name": ...}}]'),
    el("label", {}, "Colours", el("select", {
      name: "theme", onchange: (event) => { set("theme", event.target.value); showTheme(); },
    }, ...["auto", "light", "dark"].map(theme))),
    el("label", {}, "API key (kept until this tab is closed)", el("input", {
      type: "password", autocomplete: "off", name: "key", value: key.get(),
      onchange: (event) => { key.set(event.target.value.trim()); changed(); },
    })),
    el("small", {}, "Enter sends, Shift+Enter starts a new line, Esc stops, Alt+N new, Alt+S settings, arrow up edits the last message."),
  );
}

function json(name, what) {
  if (!(values[name] ?? "").trim()) {
    return null;
  }
  try {
    return JSON.parse(values[name]);
  } catch (error) {
    throw new Error(`${what} in the settings is not JSON: ${error.message}`);
  }
}

/** The fields of a request that the settings ask for. */
export function fields(chat) {
  const fields = {};
  for (const [name] of NUMBERS) {
    if ((values[name] ?? "") !== "") {
      fields[name] = Number(values[name]);
    }
  }
  const schema = json("schema", "The JSON schema");
  if (schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const tools = chat && json("tools", "The list of tools");
  if (tools) {
    fields.tools = tools;
  }
  const alternatives = Number(values.alternatives ?? 0);
  if (alternatives > 0) {
    Object.assign(fields, chat ? { logprobs: true, top_logprobs: alternatives } : { logprobs: alternatives });
  }
  return fields;
}
