// The Vercel AI SDK with its providers for OpenAI (chat completions, responses) and Anthropic.
import { apiKey, baseURL, load, model as name, question, tell } from "./answers.mjs";

const { Output, generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");
const [protocol, ...form] = process.argv.slice(2);

async function provided() {
  if (protocol === "messages") {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return createAnthropic({ baseURL, apiKey })(name);
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const openai = createOpenAI({ baseURL, apiKey });
  return protocol === "responses" ? openai.responses(name) : openai.chat(name);
}

const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.int().min(0).max(99999), b: z.int().min(0).max(99999) }),
  strict: false,
  execute: async ({ a, b }) => String(a + b),
});
const verdict = z.object({ right: z.boolean(), digit: z.enum(["one", "two", "three"]) });
const request = { model: await provided(), prompt: question, maxOutputTokens: 300, stopWhen: stepCountIs(5) };
const onError = ({ error }) => {
  throw error;
};

if (form.includes("structured")) {
  for (let number = 0; number < 2; number++) {
    const { output } = await generateText({ ...request, output: Output.object({ schema: verdict }) });
    tell("", [], output);
  }
} else {
  if (form.includes("tools")) request.tools = { add };
  for (let number = 0; number < (request.tools ? 1 : 2); number++) {
    const run = form.includes("stream") ? streamText({ ...request, onError }) : await generateText(request);
    for (const step of await run.steps)
      tell(step.text, step.toolCalls.map((call) => [call.toolName, call.input]));
  }
}
