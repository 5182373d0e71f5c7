// The one place that speaks HTTP: JSON in, errors as text, and a refetch when the run says that something changed.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { answer, embedded } from "./embedded";
import { subscribe } from "./stream";

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

/** Address of an API path, e.g. url("runs", id, "groups", group); slashes inside a part stay path separators. */
export function url(...parts: string[]): string {
  const path = parts.map((part) => part.split("/").map(encodeURIComponent).join("/")).join("/");
  return new URL(`api/${path}`, document.baseURI.split("#")[0]).href;
}

export function withQuery(address: string, query: URLSearchParams | Record<string, string | number | null | undefined>): string {
  const search = query instanceof URLSearchParams ? query : new URLSearchParams();
  if (!(query instanceof URLSearchParams)) {
    for (const [key, value] of Object.entries(query)) {
      if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
    }
  }
  const text = search.toString();
  return text === "" ? address : `${address}?${text}`;
}

export async function get<T>(address: string, signal?: AbortSignal): Promise<T> {
  return request<T>(address, signal ? { signal } : {});
}

export async function post<T>(address: string, body: unknown): Promise<T> {
  return request<T>(address, {
    method: "POST",
    headers: { "content-type": "application/json", "x-swarmq-confirm": "yes" },
    body: JSON.stringify(body),
  });
}

async function request<T>(address: string, options: RequestInit): Promise<T> {
  if (embedded !== null) {
    const known = answer(address);
    if (known === undefined) throw new ApiError(404, "This file does not hold that. The run's dashboard does.");
    return known as T;
  }
  let response: Response;
  try {
    response = await fetch(address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "The dashboard's server does not answer. Is `swarmq dashboard` still running?");
  }
  const text = await response.text();
  let body: unknown;
  try {
    body = text === "" ? null : JSON.parse(text);
  } catch {
    throw new ApiError(response.status, `The server answered ${response.status} without JSON.`);
  }
  if (!response.ok) {
    const said = (body as { error?: unknown; detail?: unknown } | null) ?? {};
    throw new ApiError(response.status, String(said.error ?? said.detail ?? `The server answered ${response.status}.`));
  }
  return body as T;
}

export interface Loaded<T> {
  data: T | null; // the newest answer; stays while a newer one is fetched
  error: ApiError | null;
  isLoading: boolean;
  reload: () => void;
}

/** Called when the server wants a login; main.tsx shows the form. */
export const unauthorized = { notify: (): void => undefined };

/**
 * Fetch an address (null: nothing yet) and fetch it again whenever the run `live` changes in one of the ways of `on`
 * ("steps", "episodes", "state", "warnings"; any change without `on`) but at most once in `restS` seconds, or every `everyS`
 * seconds, which may depend on the data. With `keeps` the data of the address before stays until the new one's has come.
 */
export function useApi<T>(
  address: string | null,
  { live = null, on, restS = 0, everyS, keeps = false }: {
    live?: string | null; on?: string[]; restS?: number; everyS?: number | ((data: T | null) => number | undefined); keeps?: boolean;
  } = {},
): Loaded<T> {
  const [state, setState] = useState<{ address: string | null; data: T | null; error: ApiError | null; isLoading: boolean }>(
    { address, data: null, error: null, isLoading: address !== null },
  );
  const [count, setCount] = useState(0);
  const reload = useCallback(() => setCount((n) => n + 1), []);
  const busy = useRef(false);
  const again = useRef(false);
  const askedAt = useRef(0);

  useEffect(() => {
    if (address === null) return;
    const abort = new AbortController();
    busy.current = true;
    askedAt.current = Date.now();
    setState((old) => ({ ...old, address, data: keeps || old.address === address ? old.data : null, isLoading: true }));
    get<T>(address, abort.signal).then(
      (data) => setState({ address, data, error: null, isLoading: false }),
      (error: unknown) => {
        if (abort.signal.aborted) return;
        const known = error instanceof ApiError ? error : new ApiError(0, String(error));
        if (known.status === 401) unauthorized.notify();
        setState((old) => ({ ...old, error: known, isLoading: false }));
      },
    ).finally(() => {
      if (abort.signal.aborted) return;
      busy.current = false;
      if (again.current) {
        again.current = false;
        reload();
      }
    });
    return () => abort.abort();
  }, [address, count]);

  const reasons = on?.join() ?? "";
  useEffect(() => {
    if (live === null) return;
    let timer = 0;
    const refetch = () => {
      timer = 0;
      if (busy.current) again.current = true; // a slow answer: fetch once more after it, never pile up
      else reload();
    };
    const end = subscribe(live, (what) => {
      if (reasons !== "" && !what.some((name) => reasons.split(",").includes(name))) return;
      if (timer === 0) timer = window.setTimeout(refetch, Math.max(0, askedAt.current + restS * 1000 - Date.now()));
    });
    return () => {
      clearTimeout(timer);
      end();
    };
  }, [live, reasons, restS]);

  const pauseS = typeof everyS === "function" ? everyS(state.data) : everyS;
  useEffect(() => {
    if (pauseS === undefined) return;
    const timer = setInterval(() => { if (!document.hidden && !busy.current) reload(); }, pauseS * 1000);
    return () => clearInterval(timer);
  }, [pauseS]);

  return { data: keeps || state.address === address ? state.data : null, error: state.error, isLoading: state.isLoading, reload };
}
