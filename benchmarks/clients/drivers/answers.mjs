// What all drivers in JavaScript share; see answers.py.
import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const baseURL = process.env.AGENT_BASE_URL;
export const apiKey = process.env.AGENT_KEY;
export const model = "main";
export const question = "What is 1 + 2 + 3 + 4?";
export const followUp = "And what is that in words?";
export const numbers = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
export const add = ({ a, b }) => String(a + b);

const require = createRequire(process.env.AGENT_MODULES + "/");
export const load = (name) => import(pathToFileURL(require.resolve(name)));

// `calls` are pairs of name and arguments, `parsed` is what a library made of a structured answer.
export function tell(text, calls = [], parsed = null) {
  const told = calls.map(([name, given]) => ({ name, arguments: given }));
  appendFileSync(process.env.AGENT_ANSWERS, JSON.stringify({ text: text ?? "", calls: told, parsed }) + "\n");
}
