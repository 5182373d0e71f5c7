// A list that grows page by page. While only its first page is read it follows the run; afterwards it stays still under the
// reader and says that there is news.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, get, unauthorized } from "../api";
import { subscribe } from "../stream";
import type { EpisodePage, EpisodeRow, IndexProgress } from "../types";

export interface Pages {
  rows: EpisodeRow[];
  total: number;
  index: IndexProgress | undefined; // of the newest answer
  isDone: boolean;
  isLoading: boolean;
  hasNews: boolean;
  error: ApiError | null;
  more: () => void;
  reload: () => void;
}

interface State { address: string; rows: EpisodeRow[]; total: number; next: string | null; pages: number; index?: IndexProgress | undefined }

export function usePages(address: string, run: string): Pages {
  const nothing: State = { address, rows: [], total: 0, next: null, pages: 0 };
  const [state, setState] = useState<State>(nothing);
  const [isLoading, setLoading] = useState(true);
  const [hasNews, setNews] = useState(false);
  const [error, setError] = useState<ApiError | null>(null);
  const busy = useRef<AbortController | null>(null);
  const present = state.address === address ? state : nothing;

  const load = useCallback((from: State | null) => {
    busy.current?.abort();
    const abort = new AbortController();
    busy.current = abort;
    setLoading(true);
    const target = new URL(address);
    if (from?.next) target.searchParams.set("cursor", from.next);
    get<EpisodePage>(target.href, abort.signal).then(
      (page) => {
        busy.current = null;
        const known = new Set(from?.rows.map(({ id }) => id));
        setState({
          address, total: page.total, next: page.next, index: page.index, pages: (from?.pages ?? 0) + 1,
          rows: [...(from?.rows ?? []), ...page.rows.filter(({ id }) => !known.has(id))],
        });
        if (from === null) setNews(false);
        setError(null);
        setLoading(false);
      },
      (problem: unknown) => {
        if (abort.signal.aborted) return;
        busy.current = null;
        const told = problem instanceof ApiError ? problem : new ApiError(0, String(problem));
        if (told.status === 401) unauthorized.notify();
        setError(told);
        setLoading(false);
      },
    );
  }, [address]);

  useEffect(() => {
    load(null);
    return () => busy.current?.abort();
  }, [load]);

  const pages = useRef(0);
  pages.current = present.pages;
  useEffect(() => subscribe(run, (what) => {
    if (!what.includes("episodes")) return;
    if (pages.current > 1) setNews(true);
    else if (busy.current === null) load(null);
  }), [run, load]);

  const isIndexing = present.index?.is_done === false;
  useEffect(() => {
    if (!isIndexing) return;
    const timer = setInterval(() => { if (busy.current === null && pages.current <= 1) load(null); }, 1000);
    return () => clearInterval(timer);
  }, [isIndexing, load]);

  return {
    index: present.index,
    rows: present.rows, total: present.total, isDone: present.pages > 0 && present.next === null, isLoading, hasNews, error,
    more: () => { if (busy.current === null && present.next !== null) load(present); },
    reload: () => load(null),
  };
}
