// Anthropic's own library for Node.
import { add, apiKey, baseURL, followUp, load, model, numbers, question, tell } from "./answers.mjs";

const { Anthropic } = await load("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey });
const form = process.argv.slice(3);
const tools = form.includes("tools") ? [{ name: "add", description: "Adds.", input_schema: numbers }] : undefined;
const messages = [{ role: "user", content: question }];

for (let number = 0; ; number++) {
  const request = { model, max_tokens: 300, messages, tools };
  const answer = form.includes("stream")
    ? await client.messages.stream(request).finalMessage()
    : await client.messages.create(request);
  const uses = answer.content.filter((block) => block.type === "tool_use");
  const text = answer.content.filter((block) => block.type === "text").map((block) => block.text);
  tell(text.join(""), uses.map((use) => [use.name, use.input]));
  messages.push({ role: "assistant", content: answer.content });
  if (uses.length) {
    const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: add(use.input) }));
    messages.push({ role: "user", content: results });
  } else if (tools || number) {
    break;
  } else {
    messages.push({ role: "user", content: followUp });
  }
}
