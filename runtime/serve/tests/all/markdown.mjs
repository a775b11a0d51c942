// Run by the test of the page's Markdown beside `markdown.js` and a `dom.js` without a browser. Prints the nodes of each case as text, and
// goes through texts on which a search that looks at marks again and again takes hours.
import { markdown } from "./markdown.js";

const flat = (node) => (typeof node === "string" ? node : `<${node.tag}>${node.children.map(flat).join("")}</>`);
for (const text of JSON.parse(process.argv[2])) {
  console.log(JSON.stringify(markdown(text).map(flat).join("")));
}
let growing = "";
for (let length = 1; growing.length < 2_000_000; length++) {
  growing += "`".repeat(length) + " ";
}
const runs = ["**a ", "*a ", "* ", "**", "`", "` ", "``a`", "*a*b", "_", "- ", "> ", "\n", "``` ", "# "];
const long = runs.map((run) => run.repeat(200_000));
for (const text of [growing, ...long, "```" + " ".repeat(500_000) + "!", "- - " + " ".repeat(500_000) + "x"]) {
  if (markdown(text).length === 0 && text.trim() !== "") {
    throw new Error(`nothing of ${text.slice(0, 20)}`);
  }
}
