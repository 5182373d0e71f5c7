// Which episodes a list shows. The filter lives in the hash's query, so that a link shows the same list to somebody else.

export const FIELDS = [
  "state", "reason", "mode", "kind", "client", "task", "policy", "step", "group", "code_version", "reward_min", "reward_max",
  "reward_above", "reward_below",   "text",
] as const;
export type Field = (typeof FIELDS)[number];

export const STATES = ["open", "waiting", "published", "trained", "dropped", "failed", "eval", "stray"] as const;

export const LABELS: Record<Field, string> = {
  state: "State", reason: "Reason", mode: "Mode", kind: "Kind", client: "Client", task: "Task", policy: "Policy", step: "Step",
  group: "Group", code_version: "Code version", reward_min: "Reward from", reward_max: "Reward to", reward_above: "Reward above",
  reward_below: "Reward below", text: "Id contains",
};

/** The part of a hash's query that the server filters by, without empty values. */
export function filterOf(query: URLSearchParams): URLSearchParams {
  const found = new URLSearchParams();
  for (const field of FIELDS) {
    const value = query.get(field)?.trim() ?? "";
    if (value !== "") found.set(field, value);
  }
  return found;
}

/** What a filter says, as [field, label, value], for the chips above the list. */
export function describe(filter: URLSearchParams): [Field, string, string][] {
  return FIELDS.flatMap((field) => {
    const value = filter.get(field);
    return value === null ? [] : [[field, LABELS[field], value] as [Field, string, string]];
  });
}

/** Options of a select: every known value, and the chosen one even if nobody knows it. */
export function options(known: Iterable<string>, chosen: string, label: (value: string) => string = (value) => value): [string, string][] {
  const values = [...new Set([...known, ...(chosen === "" ? [] : [chosen])])].filter((value) => value !== "");
  return [["", "any"], ...values.map((value) => [value, label(value)] as [string, string])];
}
