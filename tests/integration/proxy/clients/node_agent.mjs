// A tool loop with OpenAI's client for Node: plain, streamed, and over responses by the name of the last one.
import { createRequire } from "node:module";

const { OpenAI } = createRequire(process.env.AGENT_MODULES + "/")("openai");
const client = new OpenAI({ baseURL: process.env.AGENT_BASE_URL, apiKey: process.env.AGENT_KEY });
const form = process.argv[2];
const add = {
  name: "add",
  parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
};
const sum = (text) => {
  const { a, b } = JSON.parse(text);
  return String(a + b);
};
const question = { role: "user", content: "What is 1 + 2 + 3 + 4?" };

async function overChat() {
  const messages = [question];
  for (;;) {
    const request = { model: "main", messages, tools: [{ type: "function", function: add }] };
    const message =
      form === "streamed"
        ? await client.chat.completions.stream(request).finalMessage()
        : (await client.chat.completions.create(request)).choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: sum(call.function.arguments) });
  }
}

async function overResponses() {
  let input = [question];
  let previous;
  for (;;) {
    const answer = await client.responses.create({
      model: "main",
      input,
      previous_response_id: previous,
      tools: [{ type: "function", strict: false, ...add }],
    });
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    previous = answer.id;
    input = calls.map((call) => ({
      type: "function_call_output",
      call_id: call.call_id,
      output: sum(call.arguments),
    }));
  }
}

console.log(await (form === "responses" ? overResponses() : overChat()));
