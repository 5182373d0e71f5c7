// One server-sent event stream for the run on screen, shared by all that it shows.
import { useEffect, useState } from "preact/hooks";
import { url } from "./api";
import { embedded } from "./embedded";

export type StreamState = "connecting" | "open" | "lost";
type Listener = (what: string[]) => void;

const EVERYTHING = ["steps", "episodes", "state", "warnings"];
const RETRY_MS = 5000;

interface Stream { source: EventSource | null; listeners: Set<Listener>; state: StreamState; retry: number; hidden: Set<string> }

const streams = new Map<string, Stream>();
const watchers = new Set<() => void>();

/** Call `listener` with what changed in the run; the stream closes with its last listener. */
export function subscribe(run: string, listener: Listener): () => void {
  if (embedded !== null) return () => undefined; // a file never changes
  let stream = streams.get(run);
  if (stream === undefined) {
    stream = { source: null, listeners: new Set(), state: "connecting", retry: 0, hidden: new Set() };
    streams.set(run, stream);
    open(run, stream);
  }
  const joined = stream;
  joined.listeners.add(listener);
  return () => {
    joined.listeners.delete(listener);
    // A view that is replaced unsubscribes before its successor subscribes: close after both.
    setTimeout(() => {
      if (joined.listeners.size > 0 || streams.get(run) !== joined) return;
      joined.source?.close();
      clearTimeout(joined.retry);
      streams.delete(run);
    }, 1000);
  };
}

export function useStreamState(run: string | null): StreamState {
  const [, redraw] = useState(0);
  useEffect(() => {
    const watch = () => redraw((n) => n + 1);
    watchers.add(watch);
    return () => { watchers.delete(watch); };
  }, []);
  return (run === null ? undefined : streams.get(run)?.state) ?? "connecting";
}

function open(run: string, stream: Stream): void {
  const source = new EventSource(url("runs", run, "stream"));
  stream.source = source;
  source.addEventListener("open", () => {
    if (stream.state === "lost") tell(stream, EVERYTHING); // what happened meanwhile is unknown
    change(stream, "open");
  });
  source.addEventListener("changed", (event) => {
    const { what } = JSON.parse((event as MessageEvent<string>).data) as { what: string[] };
    tell(stream, what);
  });
  source.addEventListener("error", () => {
    change(stream, "lost");
    if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    clearTimeout(stream.retry);
    stream.retry = window.setTimeout(() => { if (streams.get(run) === stream) open(run, stream); }, RETRY_MS);
  });
}

function change(stream: Stream, state: StreamState): void {
  stream.state = state;
  for (const watch of watchers) watch();
}

// A hidden tab fetches nothing; it catches up when it is looked at.
function tell(stream: Stream, what: string[]): void {
  if (document.hidden) {
    for (const name of what) stream.hidden.add(name);
    return;
  }
  for (const listener of [...stream.listeners]) listener(what);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  for (const stream of streams.values()) {
    const what = [...stream.hidden];
    stream.hidden.clear();
    if (what.length > 0) tell(stream, what);
  }
});
