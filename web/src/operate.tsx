// What an operator may do to a live run. Every action says what will happen and waits for a second press.
import type { RunEntry } from "./types";

export function OperateBar(_: { run: string; entry: RunEntry | undefined }) {
  return null;
}
