// Light or dark: what the system says, unless the reader chose.
import { useEffect, useState } from "preact/hooks";

export type Choice = "system" | "light" | "dark";

const KEY = "swarmq-theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const watchers = new Set<() => void>();

function stored(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // storage is switched off
  }
}

let choice = stored();

export function resolved(): "light" | "dark" {
  return choice === "system" ? (dark.matches ? "dark" : "light") : choice;
}

function apply(): void {
  document.documentElement.dataset["theme"] = resolved();
  for (const watch of watchers) watch();
}

export function choose(next: Choice): void {
  choice = next;
  try {
    if (next === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
  } catch {
    // the choice then lasts until the page is left
  }
  apply();
}

dark.addEventListener("change", apply);
apply();

/** The choice and the resulting theme; charts draw themselves anew when the theme changes. */
export function useTheme(): { choice: Choice; theme: "light" | "dark" } {
  const [, redraw] = useState(0);
  useEffect(() => {
    const watch = () => redraw((n) => n + 1);
    watchers.add(watch);
    return () => { watchers.delete(watch); };
  }, []);
  return { choice, theme: resolved() };
}

/** The present value of a colour of app.css, for canvases, e.g. colour("series-1"). */
export function colour(name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
