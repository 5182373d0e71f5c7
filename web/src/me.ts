// Who looks, and what that person may do.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Me } from "./types";

export const MeContext = createContext<Me | null>(null);

export function useMe(): Me | null {
  return useContext(MeContext);
}
