// A small part of Markdown as DOM nodes: paragraphs, headings, lists, quotes, code, bold and italic text. No links, no images, no HTML:
// they stay the text that they are.

import { el } from "./dom.js";

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^\s*][\s\S]*?)\*\*|(?<![\w*])\*([^\s*][^*]*?)\*(?!\w)/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) {
      nodes.push(text.slice(end, match.index));
    }
    if (match[2] !== undefined) {
      nodes.push(el("code", {}, match[2]));
    } else if (match[3] !== undefined) {
      nodes.push(el("strong", {}, match[3]));
    } else {
      nodes.push(el("em", {}, match[4]));
    }
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}(\d{1,9})[.)]\s+(.*)$/;
const HEADING = /^(#{1,4})\s+(.*)$/;
const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+-]*)\s*$/;
const QUOTE = /^>\s?(.*)$/;
const RULE = /^\s{0,3}([-*_])\s*(\1\s*){2,}$/;

const isBlock = (line) => [BULLET, NUMBER, HEADING, FENCE, QUOTE, RULE].some((kind) => kind.test(line));

/** The nodes of a text. A fence that is still open holds everything behind it. */
export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  let at = 0;
  /** Takes lines as long as they match. */
  const take = (kind) => {
    const found = [];
    while (at < lines.length && kind.test(lines[at])) {
      found.push(lines[at++].match(kind));
    }
    return found;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    if (fence) {
      at++;
      const code = [];
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) {
        code.push(lines[at++]);
      }
      at++;
      nodes.push(el("pre", { title: fence[2] }, el("code", {}, code.join("\n"))));
    } else if (RULE.test(line)) {
      at++;
      nodes.push(el("hr"));
    } else if (HEADING.test(line)) {
      const [, marks, title] = lines[at++].match(HEADING);
      nodes.push(el(`h${marks.length}`, {}, ...inline(title)));
    } else if (BULLET.test(line)) {
      nodes.push(el("ul", {}, ...take(BULLET).map((item) => el("li", {}, ...inline(item[1])))));
    } else if (NUMBER.test(line)) {
      const items = take(NUMBER);
      nodes.push(el("ol", { start: Number(items[0][1]) }, ...items.map((item) => el("li", {}, ...inline(item[2])))));
    } else if (QUOTE.test(line)) {
      nodes.push(el("blockquote", {}, ...inline(take(QUOTE).map((item) => item[1]).join("\n"))));
    } else if (line.trim() === "") {
      at++;
    } else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() !== "" && (paragraph.length === 0 || !isBlock(lines[at]))) {
        paragraph.push(lines[at++]);
      }
      nodes.push(el("p", {}, ...inline(paragraph.join("\n"))));
    }
  }
  return nodes;
}
