// What stands where data will stand, is missing, or could not be fetched.
import type { ComponentChildren } from "preact";
import type { Loaded } from "../api";
import { SafeText } from "./text";

export function Loading({ what = "Loading" }: { what?: string }) {
  return <p class="state loading" role="status"><span class="spinner" aria-hidden="true" />{what}…</p>;
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
