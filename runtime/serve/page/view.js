// How messages look.

import { byId, el } from "./dom.js";
import { markdown } from "./markdown.js";

const shown = (text) => JSON.stringify(text).slice(1, -1) || "(empty)";
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function showTip(token, at) {
  const tip = byId("tip");
  const own = token.top.some(([, logprob]) => logprob === token.logprob) ? [] : [[token.text, token.logprob]];
  const rows = [...token.top, ...own].sort((a, b) => b[1] - a[1]);
  const row = ([text, logprob]) =>
    el("tr", { className: logprob === token.logprob ? "chosen" : "" }, el("td", {}, shown(text)), el("td", {}, percent(logprob)));
  tip.replaceChildren(el("table", {}, el("tbody", {}, ...rows.map(row))));
  tip.hidden = false;
  const box = at.getBoundingClientRect();
  const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? box.bottom + 4 : Math.max(4, box.top - tip.offsetHeight - 4)}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

/** The less likely a token was, the stronger its colour. */
function tokenSpan(token) {
  const likely = Math.exp(token.logprob);
  const step = likely < 0.1 ? 0 : likely < 0.4 ? 1 : likely < 0.8 ? 2 : 3;
  const show = (event) => showTip(token, event.target);
  return el("span", {
    className: `p${step}`, tabIndex: 0, onmouseenter: show, onfocus: show, onmouseleave: hideTip, onblur: hideTip,
  }, token.text);
}

function usage(message) {
  const { usage: u, ended } = message;
  const parts = [];
  if (u) {
    parts.push(`${u.written} tokens`, `${u.rate.toFixed(1)} tokens/s`, `first after ${u.first.toFixed(2)} s`);
    parts.push(`${u.cached} of ${u.prompt} prompt tokens known`);
  }
  if (ended && ended !== "stop" && ended !== "tool_calls") {
    parts.push(ended === "length" ? "cut off at the maximum number of tokens" : ended);
  }
  return parts.join(" · ");
}

function calls(message, actions, answered) {
  return (message.calls ?? []).map((call) =>
    el("div", { className: "call" },
      el("strong", {}, `${call.name}()`), el("pre", {}, el("code", {}, pretty(call.arguments))),
      answered ? null : el("textarea", { rows: 2, placeholder: "Result of the call", "aria-label": `Result of ${call.name}`,
        value: call.result ?? "", oninput: (event) => { call.result = event.target.value; } })))
    .concat(message.calls?.length && !answered ? [el("button", { onclick: () => actions.results(message) }, "Send results")] : []);
}

/** The inner part of a message: what changes while it is written. */
function content(message) {
  if (message.tokens?.length) {
    return el("div", { className: "tokens" }, ...message.tokens.map(tokenSpan));
  }
  if (message.role === "assistant") {
    return el("div", { className: "content" }, markdown(message.content));
  }
  return el("div", { className: "content" }, el("p", {}, message.content));
}

function editor(message, actions) {
  const text = el("textarea", { rows: 4, value: message.content, "aria-label": "Edited text" });
  const keys = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      actions.cancel(message);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      actions.edited(message, text.value);
    }
  };
  text.addEventListener("keydown", keys);
  return el("div", { className: "editor" }, text, el("footer", {},
    el("button", { onclick: () => actions.edited(message, text.value) }, message.role === "user" ? "Save and ask" : "Save"),
    el("button", { onclick: () => actions.cancel(message) }, "Cancel")));
}

const NAMES = { user: "You", assistant: "Model", tool: "Result" };

/** A message; `state` says whether it is being written or edited, and whether its calls were answered. */
export function article(message, state, actions) {
  const parts = [el("header", {}, message.role === "tool" ? `Result of ${message.name ?? "a call"}` : NAMES[message.role])];
  if (state.edited) {
    parts.push(editor(message, actions));
    return el("article", { className: message.role }, ...parts);
  }
  if (message.reasoning) {
    parts.push(el("details", { open: state.running && !message.content }, el("summary", {}, "Reasoning"), el("p", {}, message.reasoning)));
  }
  parts.push(content(message), ...calls(message, actions, state.answered || state.running));
  if (message.error) {
    parts.push(el("p", { className: "error", role: "alert" }, message.error));
  }
  const foot = el("footer", {});
  if (!state.busy) {
    foot.append(el("button", { onclick: () => actions.copy(message) }, "Copy"), el("button", { onclick: () => actions.edit(message) }, "Edit"));
    if (message.role === "assistant") {
      foot.append(el("button", { onclick: () => actions.again(message) }, "Regenerate"));
    }
  }
  foot.append(state.running ? "writing ..." : usage(message));
  parts.push(foot);
  return el("article", { className: message.role }, ...parts);
}
