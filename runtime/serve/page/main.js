// The page: its parts, and what its buttons and keys do.

import { get } from "./api.js";
import { answer } from "./answer.js";
import { byId, el } from "./dom.js";
import { fill, showTheme, values } from "./settings.js";
import * as store from "./store.js";
import { article } from "./view.js";

/** Milliseconds between two looks at an answer that is being written. */
const REDRAW = 60;

let conversation = store.make();
let running = null;
let edited = null;
let isChat = true;

const note = (text) => { byId("state").textContent = text; };

function state(message, at) {
  const next = conversation.messages[at + 1];
  return { running: running?.message === message, busy: running !== null, edited: edited === message, answered: next?.role === "tool" };
}

function draw() {
  const box = byId("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const welcome = isChat ? "Ask something." : "This model has no chat template: it continues your text.";
  const all = conversation.messages.map((message, at) => article(message, state(message, at), actions));
  box.replaceChildren(...(all.length > 0 ? all : [el("p", { className: "empty" }, welcome)]));
  box.setAttribute("aria-busy", String(running !== null));
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  if (atEnd) {
    box.scrollTop = box.scrollHeight;
  }
  drawList();
}

/** The message that is being written, and nothing else. */
function redraw(message) {
  const box = byId("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const at = conversation.messages.indexOf(message);
  box.children[at]?.replaceWith(article(message, state(message, at), actions));
  if (atEnd) {
    box.scrollTop = box.scrollHeight;
  }
}

function drawList() {
  const entry = ({ id, title }) => el("li", {}, el("button", {
    onclick: () => open(id), "aria-current": String(id === conversation.id),
  }, title || "(without a title)"));
  byId("conversations").replaceChildren(...store.list().map(entry));
}

function keep() {
  const first = conversation.messages.find(({ role }) => role === "user");
  conversation.title = (first?.content ?? "").slice(0, 60);
  if (!store.save(conversation)) {
    note("The browser's storage is full: this conversation is not saved. Export it, or delete others.");
  }
}

function open(id) {
  const found = store.load(id);
  if (found) {
    running?.controller.abort();
    conversation = found;
    edited = null;
  }
  byId("side").classList.remove("open");
  draw();
}

function fresh() {
  running?.controller.abort();
  conversation = store.make();
  edited = null;
  draw();
  byId("input").focus();
}

/** Lets the model answer what stands there. */
async function ask() {
  const own = conversation;
  const message = { role: "assistant", content: "" };
  const before = [...own.messages];
  own.messages.push(message);
  const mine = { message, controller: new AbortController() };
  running = mine;
  edited = null;
  keep();
  draw();
  byId("messages").scrollTop = byId("messages").scrollHeight;
  let timer = null;
  const changed = () => {
    timer ??= setTimeout(() => { timer = null; if (running === mine) { redraw(message); } }, REDRAW);
  };
  await answer(byId("model").value, isChat, before, message, mine.controller.signal, changed);
  clearTimeout(timer);
  if (running === mine) {
    running = null;
  }
  if (own === conversation) {
    keep();
    draw();
  } else if (store.load(own.id)) {
    store.save(own);
    drawList();
  }
}

const actions = {
  copy: (message) => navigator.clipboard?.writeText(message.content),
  edit: (message) => {
    edited = message;
    draw();
    document.querySelector(".editor textarea")?.focus();
  },
  cancel: () => {
    edited = null;
    draw();
  },
  /** What came after a question that was changed is gone; it is asked again. */
  edited: (message, text) => {
    edited = null;
    message.content = text;
    delete message.tokens;
    if (message.role === "user") {
      conversation.messages.length = conversation.messages.indexOf(message) + 1;
      ask();
    } else {
      keep();
      draw();
    }
  },
  again: (message) => {
    conversation.messages.length = conversation.messages.indexOf(message);
    ask();
  },
  results: (message) => {
    conversation.messages.length = conversation.messages.indexOf(message) + 1;
    const result = ({ id, name, result = "" }) => ({ role: "tool", content: result, call_id: id, name });
    conversation.messages.push(...message.calls.map(result));
    ask();
  },
};

function send() {
  const input = byId("input");
  if (running !== null || input.value.trim() === "") {
    return;
  }
  conversation.messages.push({ role: "user", content: input.value });
  input.value = "";
  ask();
}

function exported() {
  const data = new Blob([JSON.stringify({ ...conversation, settings: values }, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(data);
  const title = conversation.title.replace(/[^\w-]+/g, "-").slice(0, 40) || "conversation";
  el("a", { href: url, download: `${title}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function imported() {
  const read = async (event) => {
    let found = null;
    try {
      found = store.checked(JSON.parse(await event.target.files[0].text()));
    } catch { /* no JSON */ }
    if (found) {
      conversation = { id: store.make().id, title: found.title, messages: found.messages };
      keep();
      draw();
    } else {
      note("That file contains no conversation.");
    }
  };
  el("input", { type: "file", accept: ".json,application/json", onchange: read }).click();
}

function remove() {
  if (conversation.messages.length > 0 && confirm("Delete this conversation?")) {
    const { id } = conversation;
    fresh();
    store.remove(id);
    drawList();
  }
}

const toggleSettings = () => { byId("settings").hidden = !byId("settings").hidden; };

function keys(event) {
  const letter = event.altKey && !event.ctrlKey && !event.metaKey ? event.code : "";
  if (event.key === "Escape") {
    running?.controller.abort();
    byId("side").classList.remove("open");
  } else if (letter === "KeyN") {
    event.preventDefault();
    fresh();
  } else if (letter === "KeyS") {
    event.preventDefault();
    toggleSettings();
  }
}

function inputKeys(event) {
  const last = conversation.messages.findLast(({ role }) => role === "user");
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && event.target.value === "" && last && running === null) {
    event.preventDefault();
    actions.edit(last);
  }
}

async function showModel() {
  const name = byId("model").value;
  const props = await get(`/props?model=${encodeURIComponent(name)}`);
  isChat = props.chat;
  fill(byId("settings"), props.default_generation_settings, connect);
  note(`context ${props.context ?? "unbounded"}, ${props.executor}`);
  draw();
}

async function connect() {
  try {
    const { data } = await get("/v1/models");
    const before = byId("model").value;
    byId("model").replaceChildren(...data.map(({ id }) => el("option", { selected: id === before }, id)));
    await showModel();
  } catch (error) {
    fill(byId("settings"), {}, connect);
    byId("settings").hidden = false;
    note(error.message);
  }
}

showTheme();
byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("input").addEventListener("keydown", inputKeys);
byId("stop").addEventListener("click", () => running?.controller.abort());
byId("new").addEventListener("click", fresh);
byId("options").addEventListener("click", toggleSettings);
byId("menu").addEventListener("click", () => byId("side").classList.toggle("open"));
byId("export").addEventListener("click", exported);
byId("import").addEventListener("click", imported);
byId("remove").addEventListener("click", remove);
byId("model").addEventListener("change", () => showModel().catch((error) => note(error.message)));
document.addEventListener("keydown", keys);
draw();
byId("input").focus();
connect();
