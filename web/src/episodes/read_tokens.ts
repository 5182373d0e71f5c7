// Tokens are read page by page: the first page is shown at once, the others follow while the reader reads.
import { useEffect, useState } from "preact/hooks";
import { ApiError, get, unauthorized, url, withQuery } from "../api";
import type { TokenPage } from "../types";
import { append, empty } from "./tokens";
import type { Columns } from "./tokens";

const FIRST = 1_000;
const NEXT = 4_000;
const MOST = 20_000; // that the server gives at once
const BY_ITSELF = 60_000; // tokens that are read without being asked

export interface Read {
  columns: Columns;
  isDone: boolean;
  isHeld: boolean; // there are more tokens than are read without being asked
  error: ApiError | null;
  readOn: () => void;
}

export function useTokens(run: string, id: string, timeline: number): Read {
  const key = `${run}/${id}/${timeline}`;
  const [state, setState] = useState<{ key: string; columns: Columns; error: ApiError | null }>({ key, columns: empty(), error: null });
  const [allowed, setAllowed] = useState(BY_ITSELF);
  const columns = state.key === key ? state.columns : empty();
  const count = columns.id.length;
  const isDone = count > 0 && count >= columns.total;
  const error = state.key === key ? state.error : null;
  const isHeld = !isDone && count >= allowed;

  useEffect(() => {
    if (isDone || isHeld || error !== null) return;
    const abort = new AbortController();
    const limit = count === 0 ? FIRST : Math.min(MOST, Math.max(NEXT, count)); // few pages, few redraws
    const address = withQuery(url("runs", run, "episodes", id, "tokens"), { timeline, from: count, limit });
    get<TokenPage>(address, abort.signal).then(
      (page) => {
        const grown = append(columns, page);
        const stuck = grown.id.length === count && count < page.total;
        setState({ key, columns: page.total === 0 ? { ...columns, timelines: page.timelines } : grown, error: stuck || page.total === 0 ? new ApiError(404, NO_TOKENS) : null });
      },
      (problem: unknown) => {
        if (abort.signal.aborted) return;
        const told = problem instanceof ApiError ? problem : new ApiError(0, String(problem));
        if (told.status === 401) unauthorized.notify();
        setState({ key, columns, error: told });
      },
    );
    return () => abort.abort();
  }, [key, count, isDone, isHeld, error]);

  return {
    columns, isDone, isHeld, error,
    readOn: () => {
      setAllowed(error === null ? Infinity : allowed);
      setState({ key, columns, error: null });
    },
  };
}

const NO_TOKENS = "No tokens of this timeline are kept.";
