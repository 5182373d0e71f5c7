// What an operator may do to a live run. Every action says what will happen, waits for a second press, and is recorded with the
// operator's name by the server.
import { useState } from "preact/hooks";
import { post, url } from "./api";
import { useMe } from "./me";
import type { RunEntry } from "./types";
import { Dialog } from "./ui/dialog";
import { Prose } from "./ui/parts";
import { SafeText } from "./ui/text";

export type Action = "pause" | "resume" | "drain" | "checkpoint" | "set" | "stop" | "revoke";

interface Explained { title: string; button: string; is_danger?: boolean; what: string }

const ACTIONS: Record<Action, Explained> = {
  pause: {
    title: "Pause the run", button: "Pause",
    what: "Each learner pauses after its present step, and no tickets are issued. Running episodes go on and wait to be trained.",
  },
  resume: { title: "Resume the run", button: "Resume", what: "Tickets are issued again and learners go on, after a pause, a drain or a stop." },
  drain: {
    title: "Drain the run", button: "Drain",
    what: "No tickets are issued any more; the episodes that have begun are finished and trained. Resume continues the run.",
  },
  checkpoint: {
    title: "Write a checkpoint", button: "Write checkpoint",
    what: "Each learner writes a checkpoint after its present step. Training waits while it is written.",
  },
  set: { title: "Change a setting", button: "Change", what: "The change holds from a learner's next step on and is kept in the run's history." },
  stop: {
    title: "Stop the run", button: "Stop", is_danger: true,
    what: "Learners write a checkpoint and end after their present step. Engines and proxies stay up. The run stays stopped, also across restarts, until it is resumed.",
  },
  revoke: {
    title: "Revoke a client", button: "Revoke", is_danger: true,
    what: "Its keys are refused and its connections closed, for good. Episodes that it has ended are still trained.",
  },
};

const LIVE = ["up", "running", "live", "paused", "draining", "starting"];

/** A run's state is a few words, e.g. "up, paused". */
export function statesOf(entry: RunEntry | undefined): string[] {
  return entry?.state.split(", ") ?? [];
}

export function isLive(entry: RunEntry | undefined): boolean {
  const states = statesOf(entry);
  return !states.includes("stopped") && states.some((state) => LIVE.includes(state));
}

export function OperateBar({ run, entry }: { run: string; entry: RunEntry | undefined }) {
  const [action, setAction] = useState<Action | null>(null);
  if (entry === undefined || !isLive(entry)) return null;
  const isHeld = statesOf(entry).some((state) => ["paused", "draining", "ended"].includes(state));
  const offered: Action[] = [...(isHeld ? ["resume" as const] : []), "pause", "drain", "checkpoint", "set", "stop"];
  return (
    <section class="operate" aria-label="Operate the run">
      {offered.map((name) => (
        <button key={name} class={ACTIONS[name].is_danger ? "danger" : ""} onClick={() => setAction(name)}>
          {name === "set" ? "Change a setting" : ACTIONS[name].button}…
        </button>
      ))}
      {action !== null && <Confirm run={run} action={action} policies={Object.keys(entry.policies)} onClose={() => setAction(null)} />}
    </section>
  );
}

/** Ask, act, and say what came of it. */
export function Confirm({ run, action, client = "", policies = [], path: given = "", onClose }: {
  run: string; action: Action; client?: string; policies?: string[]; path?: string; onClose: () => void;
}) {
  const me = useMe();
  const [path, setPath] = useState(given);
  const [value, setValue] = useState("");
  const [policy, setPolicy] = useState("");
  const [state, setState] = useState<{ busy: boolean; done: string; error: string }>({ busy: false, done: "", error: "" });
  const { title, button, what, is_danger } = ACTIONS[action];

  const send = (event: Event) => {
    event.preventDefault();
    const body: Record<string, unknown> = { action };
    if (action === "set") body["settings"] = { [path.trim()]: literalOf(value) };
    if (action === "revoke") body["client"] = client;
    if (policy !== "") body["policy"] = policy;
    setState({ busy: true, done: "", error: "" });
    post<{ text: string }>(url("runs", run, "actions"), body).then(
      ({ text }) => setState({ busy: false, done: text === "" ? "Done." : text, error: "" }),
      (error: unknown) => setState({ busy: false, done: "", error: error instanceof Error ? error.message : String(error) }),
    );
  };
  return (
    <Dialog title={title} onClose={onClose}>
      <form class="confirm" onSubmit={send}>
        {client !== "" && <p><b><SafeText text={client} inline /></b></p>}
        <p><Prose text={what} /></p>
        {action === "set" && state.done === "" && (
          <div class="controls">
            <label class="field"><span>Setting, e.g. policies.main.learning_rate</span>
              <input type="text" required size={34} value={path} spellcheck={false} onInput={(event) => setPath(event.currentTarget.value)} />
            </label>
            <label class="field"><span>New value, as in the job file</span>
              <input type="text" required size={16} value={value} spellcheck={false} onInput={(event) => setValue(event.currentTarget.value)} />
            </label>
          </div>
        )}
        {action === "stop" && policies.length > 1 && state.done === "" && (
          <label class="field"><span>Policy</span>
            <select value={policy} onChange={(event) => setPolicy(event.currentTarget.value)}>
              <option value="">all</option>
              {policies.map((name) => <option key={name} value={name}>{name}</option>)}
            </select>
          </label>
        )}
        {state.error !== "" && <p class="state failed" role="alert"><SafeText text={state.error} inline /></p>}
        {state.done !== "" && <p class="state done" role="status"><SafeText text={state.done} inline /></p>}
        <div class="dialog-foot">
          {state.done === "" ? (
            <>
              <span class="quiet-text recorded">Recorded as done by {me?.name ? <SafeText text={me.name} inline /> : "you"}.</span>
              <button type="button" onClick={onClose}>Cancel</button>
              <button type="submit" class={`primary ${is_danger ? "danger" : ""}`} disabled={state.busy}>{button}</button>
            </>
          ) : <button type="button" class="primary" onClick={onClose}>Close</button>}
        </div>
      </form>
    </Dialog>
  );
}

// 0.5, true, [1, 2] and "text" as they are; a bare word is text.
function literalOf(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
