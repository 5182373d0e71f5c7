// Keyboard: j and k walk through rows, g and a letter opens a view, ? lists them all. Nothing happens while text is typed.
import { useEffect, useState } from "preact/hooks";
import { link, navigate } from "./router";
import { Dialog } from "./ui/dialog";
import { VIEWS } from "./views/all";

const CHORD_MS = 1200;

export function useShortcuts(run: string | null): { isHelpOpen: boolean; setHelpOpen: (open: boolean) => void } {
  const [isHelpOpen, setHelpOpen] = useState(false);
  useEffect(() => {
    let chordUntil = 0;
    const press = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      if (document.querySelector("dialog[open]") !== null) return;
      if (Date.now() < chordUntil) {
        chordUntil = 0;
        const view = VIEWS.find(({ key }) => key !== "" && key === event.key);
        if (event.key === "r") navigate(link(null, "runs"));
        else if (view !== undefined && run !== null) navigate(link(run, view.id));
        else return;
        event.preventDefault();
        return;
      }
      switch (event.key) {
        case "g": chordUntil = Date.now() + CHORD_MS; break;
        case "j": walk(1); break;
        case "k": walk(-1); break;
        case "/": document.querySelector<HTMLElement>("main [data-filter] input, main input")?.focus(); break;
        case "?": setHelpOpen(true); break;
        default: return;
      }
      event.preventDefault();
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [run]);
  return { isHelpOpen, setHelpOpen };
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName));
}

/** Move the focus to the link of the next row (or the one before). */
function walk(by: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("main [data-row]")];
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const row = rows[at === -1 ? (by > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + by))];
  if (row === undefined) return;
  const target = row.querySelector<HTMLElement>("a[href], button") ?? row;
  if (target === row) row.tabIndex = -1;
  target.focus();
  row.scrollIntoView({ block: "nearest" });
}

export function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <dl class="keys">
        <Key keys={["j"]} does="next row" />
        <Key keys={["k"]} does="previous row" />
        <Key keys={["Enter"]} does="open the row" />
        <Key keys={["/"]} does="go to the first filter" />
        <Key keys={["←", "→"]} does="move the cursor of a focused chart" />
        <Key keys={["g", "r"]} does="all runs" />
        {VIEWS.filter(({ key }) => key !== "").map(({ key, title }) => (
          <Key key={key} keys={["g", key]} does={title.toLowerCase()} />
        ))}
        <Key keys={["?"]} does="this list" />
        <Key keys={["Esc"]} does="close a dialog" />
      </dl>
    </Dialog>
  );
}

function Key({ keys, does }: { keys: string[]; does: string }) {
  return <div class="key"><dt>{keys.map((key) => <kbd key={key}>{key}</kbd>)}</dt><dd>{does}</dd></div>;
}
