// Hash routes: `#/run/{id}/{view}/{argument}?{query}`. Everything that a view shows is in the address, so a link can be sent.
import { useEffect, useState } from "preact/hooks";
import { holds } from "./embedded";

export interface Route {
  run: string | null; // null on the list of runs
  view: string;
  arg: string; // a group, an episode, a log file; "" if the view has none
  query: URLSearchParams;
}

export type Query = Record<string, string | number | boolean | null | undefined>;

export function parse(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter((part) => part !== "").map(decode);
  const query = new URLSearchParams(search);
  if (parts[0] !== "run" || parts[1] === undefined) return { run: null, view: parts[0] ?? "runs", arg: "", query };
  return { run: parts[1], view: parts[2] ?? "overview", arg: parts.slice(3).join("/"), query };
}

/** Return the address of a view; entries of `query` that are empty are left out. */
export function link(run: string | null, view: string, arg = "", query: Query = {}): string {
  const path = run === null ? [view] : ["run", run, view, ...(arg === "" ? [] : [arg])];
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) search.set(key, String(value));
  }
  const text = search.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text === "" ? "" : `?${text}`}`;
}

/** Return the address of a view, or undefined if this is an exported file that does not hold it. */
export function to(run: string | null, view: string, arg = "", query: Query = {}): string | undefined {
  return run === null || holds(run, view, arg) ? link(run, view, arg, query) : undefined;
}

/** Change the query of the present view; without `push` the back button does not see it. */
export function setQuery(change: Query, push = false): void {
  const route = parse(location.hash);
  const merged: Query = { ...Object.fromEntries(route.query), ...change };
  const target = link(route.run, route.view, route.arg, merged);
  if (push) location.hash = target;
  else {
    history.replaceState(null, "", target);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

export function navigate(target: string): void {
  location.hash = target;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const update = () => setRoute(parse(location.hash));
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return route;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone % in a link that was typed by hand
  }
}
