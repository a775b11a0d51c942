// Elements without markup: text is only ever put in as text, so that what a model writes stays inert.

/** An element with properties, listeners (`onclick` and so on) and children: elements, strings, or lists of them. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (name in element) {
      element[name] = value;
    } else {
      element.setAttribute(name, value);
    }
  }
  // One by one: a call takes only so many.
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) {
      element.append(child);
    }
  }
  return element;
}

export const byId = (id) => document.getElementById(id);
