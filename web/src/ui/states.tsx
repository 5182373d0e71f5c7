// What stands where data will stand, is missing, or could not be fetched.
import type { ComponentChildren } from "preact";
import type { Loaded } from "../api";
import { percent, plural } from "../format";
import type { IndexProgress } from "../types";
import { Meter } from "./parts";
import { SafeText } from "./text";

export function Loading({ what = "Loading" }: { what?: string }) {
  return <p class="state loading" role="status"><span class="spinner" aria-hidden="true" />{what}…</p>;
}

/** For `useApi`: ask every second while the index is built. */
export const whileIndexed = (data: { index?: IndexProgress } | null): number | undefined => (data?.index?.is_done === false ? 1 : undefined);

/** How far the index is, in place of numbers that it does not have yet. */
export function Indexing({ index }: { index: IndexProgress }) {
  return (
    <div class="state indexing" role="status">
      <p>Indexing the run's episodes: {plural(index.episodes, "episode")} so far, {percent(index.share)} of its files. Counts are shown when it is done.</p>
      <Meter share={index.share} label="Share of the run's files that is indexed" />
      {index.notes.map((note) => <p key={note} class="note"><SafeText text={note} inline /></p>)}
    </div>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <div class="state empty">{children}</div>;
}

export function Failed({ error, retry }: { error: Error; retry?: () => void }) {
  return (
    <div class="state failed" role="alert">
      <SafeText text={error.message} inline />
      {retry && <button onClick={retry}>Try again</button>}
    </div>
  );
}

/** Show `children(data)`; without data, that it is loading or why it failed. A failed refetch keeps the old data on screen. */
export function Await<T>({ of, what, children }: { of: Loaded<T>; what?: string; children: (data: T) => ComponentChildren }) {
  if (of.data === null) {
    return of.error ? <Failed error={of.error} retry={of.reload} /> : <Loading {...(what ? { what } : {})} />;
  }
  return (
    <>
      {of.error && <Failed error={of.error} retry={of.reload} />}
      {children(of.data)}
    </>
  );
}
