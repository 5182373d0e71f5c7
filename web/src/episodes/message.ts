// What a chat message says, whatever dialect wrote it: text, reasoning, tool calls, and what else it holds.
import type { Message } from "../types";

export interface ToolCall { id: string; name: string; args: string }
export interface Said {
  role: string;
  text: string;
  reasoning: string;
  calls: ToolCall[];
  name: string; // of a tool that answers, or of a speaker
  callId: string; // of the tool call that is answered
  others: [string, string][]; // parts that are no text, as JSON
}

export function read(message: Message): Said {
  const { role, content, tool_calls, name, tool_call_id, reasoning, reasoning_content, thinking, function_call } = message as Record<string, unknown>;
  const said: Said = {
    role: string(role) || "unknown", text: "", reasoning: string(reasoning_content) || string(reasoning) || string(thinking),
    calls: [], name: string(name), callId: string(tool_call_id), others: [],
  };
  const texts: string[] = [];
  if (typeof content === "string") texts.push(content);
  else if (Array.isArray(content)) for (const part of content) readPart(part, said, texts);
  else if (content !== null && content !== undefined) said.others.push(["content", pretty(content)]);
  said.text = texts.join("\n");
  for (const call of Array.isArray(tool_calls) ? tool_calls : function_call ? [{ function: function_call }] : []) {
    const { id, function: target, name: own, arguments: bare } = (call ?? {}) as Record<string, unknown>;
    const inner = (target ?? {}) as Record<string, unknown>;
    said.calls.push({ id: string(id), name: string(inner["name"]) || string(own) || "unnamed tool", args: pretty(inner["arguments"] ?? bare ?? "") });
  }
  return said;
}

function readPart(part: unknown, said: Said, texts: string[]): void {
  if (typeof part === "string") {
    texts.push(part);
    return;
  }
  const { type, text, thinking, name, input, id, content } = (part ?? {}) as Record<string, unknown>;
  if (type === "thinking" && typeof thinking === "string") said.reasoning += thinking;
  else if (typeof text === "string") texts.push(text);
  else if (type === "tool_use") said.calls.push({ id: string(id), name: string(name) || "unnamed tool", args: pretty(input) });
  else if (type === "tool_result" && typeof content === "string") texts.push(content);
  else said.others.push([string(type) || "part", pretty(part)]);
}

/** JSON with line breaks; text that is no JSON stays as it is. */
export function pretty(value: unknown): string {
  if (typeof value !== "string") return JSON.stringify(value, null, 2) ?? "";
  if (value.length > 100_000 || !/^\s*[[{]/.test(value)) return value;
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}

/** The first line with anything in it, cut to `limit` characters, for the head of folded text. */
export function firstLine(text: string, limit = 90): string {
  const line = /\S[^\n]*/.exec(text.slice(0, 2000))?.[0]?.trimEnd() ?? "";
  return line.length > limit || text.trimEnd().length > line.length + 2 ? `${[...line].slice(0, limit).join("")}…` : line;
}

/** Cut text into pieces of about `size` characters, at line breaks where there are any, never inside of a character. */
export function pieces(text: string, size = 16_000): string[] {
  const found: string[] = [];
  let start = 0;
  while (start < text.length) {
    let end = Math.min(text.length, start + size);
    if (end < text.length) {
      const line = text.lastIndexOf("\n", end - 1);
      if (line > start + size / 2) end = line + 1;
      else if (/[\ud800-\udbff]/.test(text[end - 1] ?? "")) end += 1;
    }
    found.push(text.slice(start, end));
    start = end;
  }
  return found;
}

function string(value: unknown): string {
  return typeof value === "string" ? value : "";
}
