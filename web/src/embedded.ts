// An exported file holds its data: answers of the API by path, in <script type="application/json" id="data">. If it is there,
// nothing is fetched.

import type { EpisodePage, EpisodeRow } from "./types";

export interface Embedded {
  kind: "episode" | "group" | "report";
  start: string; // hash of the first view
  made_at: number;
  version: string;
  answers: Record<string, unknown>;
}

function load(): Embedded | null {
  const element = document.getElementById("data");
  return element?.getAttribute("type") === "application/json" ? JSON.parse(element.textContent ?? "null") as Embedded : null;
}

export const embedded = load();

interface Known { path: string; query: URLSearchParams; answer: unknown }

const known: Known[] = Object.entries(embedded?.answers ?? {}).map(([key, answer]) => {
  const [path = "", query = ""] = key.split(/\?(.*)/s);
  return { path, query: new URLSearchParams(query), answer };
});

/** The file's answer to an address: that with the same path whose query says nothing else. Undefined if there is none. */
export function answer(address: string): unknown {
  const asked = new URL(address);
  const path = asked.pathname.slice(asked.pathname.lastIndexOf("/api/") + "/api/".length).split("/").map(decodeURIComponent).join("/");
  const found = known
    .filter((one) => one.path === path && [...one.query].every(([name, value]) => asked.searchParams.get(name) === value))
    .sort((a, b) => b.query.size - a.query.size)[0]?.answer;
  return /^runs\/[^/]+\/episodes$/.test(path) && found !== undefined ? choose(found as EpisodePage, asked.searchParams) : found;
}

/** Those of a sample of episodes that a filter admits, in the order that was asked for; as the server would choose them. */
function choose(page: EpisodePage, filter: URLSearchParams): EpisodePage {
  const field = (row: EpisodeRow, name: string) => (row as unknown as Record<string, unknown>)[name];
  const equal = ["reason", "mode", "kind", "client", "task", "step", "group", "code_version"];
  const bounds: [string, (reward: number, bound: number) => boolean][] = [
    ["reward_min", (a, b) => a >= b], ["reward_max", (a, b) => a <= b], ["reward_above", (a, b) => a > b], ["reward_below", (a, b) => a < b],
  ];
  const rows = page.rows.filter((row) => (
    (!filter.get("state") || filter.get("state")?.split(",").includes(row.state))
    && equal.every((name) => !filter.get(name) || String(field(row, name)) === filter.get(name))
    && bounds.every(([name, admits]) => !filter.get(name) || (row.reward !== null && admits(row.reward, Number(filter.get(name)))))
    && row.id.includes(filter.get("text") ?? "")
  ));
  const sort = filter.get("sort") || "-began_at";
  const sign = sort.startsWith("-") ? -1 : 1;
  const value = (row: EpisodeRow) => Number(field(row, sort.replace("-", "")) ?? -Infinity);
  rows.sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) < value(b) ? -1 : 1)));
  return { ...page, rows, total: rows.length };
}

const ENDINGS: Record<string, RegExp> = {
  overview: /\/overview$/, curves: /\/steps$/, time: /\/time$/, evaluation: /\/evaluations$/, ledger: /\/ledger$/,
  episodes: /\/episodes$/, mix: /\/mix$/, clients: /\/clients$/, engines: /\/engines$/, settings: /\/settings$/, logs: /\/logs$/,
};

const PATHS: Record<string, string> = { episode: "episodes/{arg}", tokens: "episodes/{arg}/tokens", group: "groups/{arg}" };

/** Whether a link can lead anywhere: always on a server, in a file if what it shows is in it. */
export function holds(run: string, view: string, arg: string): boolean {
  if (embedded === null) return true;
  if (arg === "") return offers(view);
  const path = PATHS[view];
  return path !== undefined && known.some((one) => one.path === `runs/${run}/${path.replace("{arg}", () => arg)}`);
}

/** Whether a view of the navigation can be opened: always on a server, in a file if its data is in it. */
export function offers(view: string): boolean {
  if (embedded === null) return true;
  const ending = ENDINGS[view];
  return ending !== undefined && known.some(({ path }) => /^runs\/[^/]+\/[^/]+$/.test(path) && ending.test(path));
}
