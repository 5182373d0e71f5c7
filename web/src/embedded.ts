// An exported file holds its data: answers of the API by path, in <script type="application/json" id="data">. If it is there,
// nothing is fetched.

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
  return known
    .filter((one) => one.path === path && [...one.query].every(([name, value]) => asked.searchParams.get(name) === value))
    .sort((a, b) => b.query.size - a.query.size)[0]?.answer;
}

const ENDINGS: Record<string, RegExp> = {
  overview: /\/overview$/, curves: /\/steps$/, time: /\/time$/, evaluation: /\/evaluations$/, ledger: /\/ledger$/,
  episodes: /\/episodes$/, mix: /\/mix$/, clients: /\/clients$/, engines: /\/engines$/, settings: /\/settings$/, logs: /\/logs$/,
};

/** Whether a view of the navigation can be opened: always on a server, in a file if its data is in it. */
export function offers(view: string): boolean {
  if (embedded === null) return true;
  const ending = ENDINGS[view];
  return ending !== undefined && known.some(({ path }) => /^runs\/[^/]+\/[^/]+$/.test(path) && ending.test(path));
}
