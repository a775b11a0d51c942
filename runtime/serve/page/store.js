// Conversations and settings, kept in the browser.

const INDEX = "mlcc.conversations";
const SETTINGS = "mlcc.settings";
const name = (id) => `mlcc.conversation.${id}`;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False if the browser keeps nothing, or no more. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = {
  read: () => read(SETTINGS, {}),
  write: (value) => write(SETTINGS, value),
};

/** Titles with ids, the latest first. */
export const list = () => read(INDEX, []);

export const make = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", messages: [] });

export const load = (id) => checked(read(name(id), null));

/** The alternatives of tokens are not kept: they are many times the text. */
export function save(conversation) {
  const messages = conversation.messages.map(({ tokens, ...message }) => message);
  const others = list().filter((entry) => entry.id !== conversation.id);
  return write(name(conversation.id), { ...conversation, messages })
    && write(INDEX, [{ id: conversation.id, title: conversation.title }, ...others]);
}

export function remove(id) {
  localStorage.removeItem(name(id));
  write(INDEX, list().filter((entry) => entry.id !== id));
}

/** A conversation from a file, or null if it is none. */
export function checked(value) {
  const roles = ["user", "assistant", "tool"];
  const fine = (message) => roles.includes(message?.role) && typeof message.content === "string";
  if (typeof value?.id !== "string" || typeof value.title !== "string" || !Array.isArray(value.messages)) {
    return null;
  }
  return value.messages.every(fine) ? value : null;
}
