// OpenAI's own library for Node.
import { add, apiKey, baseURL, followUp, load, model, numbers, question, tell } from "./answers.mjs";

const { OpenAI } = await load("openai");
const client = new OpenAI({ baseURL, apiKey });
const [protocol, ...form] = process.argv.slice(2);
const streamed = form.includes("stream");

async function overChat() {
  const tools = form.includes("tools") ? [{ type: "function", function: { name: "add", parameters: numbers } }] : undefined;
  const messages = [{ role: "user", content: question }];
  for (let number = 0; ; number++) {
    const request = { model, messages, tools };
    const message = streamed
      ? await client.chat.completions.stream(request).finalMessage()
      : (await client.chat.completions.create(request)).choices[0].message;
    const calls = message.tool_calls ?? [];
    tell(message.content, calls.map((call) => [call.function.name, call.function.arguments]));
    messages.push(message);
    for (const call of calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: add(JSON.parse(call.function.arguments)) });
    if (!calls.length) {
      if (tools || number) return;
      messages.push({ role: "user", content: followUp });
    }
  }
}

async function overResponses() {
  let input = [{ role: "user", content: question }];
  let previous;
  const tools = [{ type: "function", strict: false, name: "add", parameters: numbers }];
  for (;;) {
    const request = { model, input, previous_response_id: previous, tools };
    const answer = streamed
      ? await client.responses.stream(request).finalResponse()
      : await client.responses.create(request);
    const calls = answer.output.filter((item) => item.type === "function_call");
    tell(answer.output_text, calls.map((call) => [call.name, call.arguments]));
    if (!calls.length) return;
    previous = answer.id;
    input = calls.map((call) => ({
      type: "function_call_output",
      call_id: call.call_id,
      output: add(JSON.parse(call.arguments)),
    }));
  }
}

await (protocol === "responses" ? overResponses() : overChat());
