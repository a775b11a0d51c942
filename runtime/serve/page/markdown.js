// A small part of Markdown as DOM nodes: paragraphs, headings, lists, quotes, code, bold and italic text. No links, no images, no HTML:
// they stay the text that they are.

import { el } from "./dom.js";

/** Where runs of backticks begin, by their length. */
function backticks(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    const places = runs.get(run.length) ?? [];
    places.push(index);
    runs.set(run.length, places);
  }
  // The last is the next one.
  runs.forEach((places) => places.reverse());
  return runs;
}

/** Text with code, bold and italic parts. Each mark is looked at once, so that time grows with the length of the text alone. */
function inline(text) {
  const nodes = [];
  const runs = backticks(text);
  const marks = /`+|\*/g;
  let end = 0;
  const add = (from, to, tag, content) => {
    if (from > end) {
      nodes.push(text.slice(end, from));
    }
    nodes.push(el(tag, {}, content));
    end = marks.lastIndex = to;
  };
  let bold = true;
  for (let mark = marks.exec(text); mark; mark = marks.exec(text)) {
    const { 0: run, index: at } = mark;
    const behind = at + run.length;
    if (run !== "*") {
      // Code goes to the next run of the same length.
      const places = runs.get(run.length);
      while (places.length > 0 && places.at(-1) < behind) {
        places.pop();
      }
      if (places.length > 0) {
        add(at, places.at(-1) + run.length, "code", text.slice(behind, places.at(-1)));
      }
      continue;
    }
    if (bold && text[behind] === "*" && /[^\s*]/.test(text[at + 2] ?? " ")) {
      const close = text.indexOf("**", at + 3);
      bold = close >= 0;
      if (bold) {
        add(at, close + 2, "strong", text.slice(at + 2, close));
        continue;
      }
    }
    if (/[^\s*]/.test(text[behind] ?? " ") && !/[\w*]/.test(text[at - 1] ?? " ")) {
      const close = text.indexOf("*", at + 2);
      if (close >= 0 && !/\w/.test(text[close + 1] ?? " ")) {
        add(at, close + 1, "em", text.slice(at + 1, close));
      }
    }
  }
  nodes.push(text.slice(end));
  return nodes;
}

const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}(\d{1,9})[.)]\s+(.*)$/;
const HEADING = /^(#{1,4})\s+(.*)$/;
const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+-]*)$/;
const QUOTE = /^>\s?(.*)$/;
const RULE = /^\s{0,3}([-*_])\s*(\1\s*){2,}$/;

const isFence = (line) => line.trimEnd().match(FENCE);
const isBlock = (line) => isFence(line) || [BULLET, NUMBER, HEADING, QUOTE, RULE].some((kind) => kind.test(line));

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
    const fence = isFence(line);
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
      nodes.push(el(`h${marks.length}`, {}, inline(title)));
    } else if (BULLET.test(line)) {
      nodes.push(el("ul", {}, take(BULLET).map((item) => el("li", {}, inline(item[1])))));
    } else if (NUMBER.test(line)) {
      const items = take(NUMBER);
      nodes.push(el("ol", { start: Number(items[0][1]) }, items.map((item) => el("li", {}, inline(item[2])))));
    } else if (QUOTE.test(line)) {
      nodes.push(el("blockquote", {}, inline(take(QUOTE).map((item) => item[1]).join("\n"))));
    } else if (line.trim() === "") {
      at++;
    } else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() !== "" && (paragraph.length === 0 || !isBlock(lines[at]))) {
        paragraph.push(lines[at++]);
      }
      nodes.push(el("p", {}, inline(paragraph.join("\n"))));
    }
  }
  return nodes;
}
