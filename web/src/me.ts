// Who looks, and what that person may do to the run on screen.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Me } from "./types";

export const MeContext = createContext<{ me: Me | null; isLive: boolean }>({ me: null, isLive: false });

export function useMe(): Me | null {
  return useContext(MeContext).me;
}

/** Whether the reader may act on the run: with the role for it, and while the run is up. */
export function useCanOperate(): boolean {
  const { me, isLive } = useContext(MeContext);
  return isLive && (me?.can_operate ?? false);
}
