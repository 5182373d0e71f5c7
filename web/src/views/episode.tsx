// One episode: why it was or was not trained, what was said, when, and what it earned.
import "../episodes/episodes.css";
import { useState } from "preact/hooks";
import { url, useApi } from "../api";
import { Conversation } from "../episodes/conversation";
import { Download } from "../episodes/download";
import { Gantt } from "../episodes/gantt";
import { pretty } from "../episodes/message";
import { Filtered, LongText } from "../episodes/parts";
import { dateTime, duration, number, plural, shortId, words } from "../format";
import { to } from "../router";
import type { EpisodeDetail, Numbers } from "../types";
import { Badge, Copy, Facts, Page, Section } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { SafeText } from "../ui/text";

export function Episode({ run, arg, query }: { run: string; arg: string; query: URLSearchParams }) {
  const detail = useApi<EpisodeDetail>(arg === "" ? null : url("runs", run, "episodes", arg), { live: run, on: ["episodes"] });
  if (arg === "") return <Page title="Episode"><Empty>Open an episode from <a href={to(run, "episodes")}>the list</a>.</Empty></Page>;
  return (
    <Page title={<>Episode <span class="mono" title={arg}>{shortId(arg)}</span></>}
          aside={<><Copy text={arg} label="Copy id" /><a class="button" href={to(run, "tokens", arg)}>Tokens</a><Download run={run} kind="episode" id={arg} /></>}>
      <Await of={detail} what="Reading the episode">{(view) => <Whole run={run} view={view} turn={query.get("turn")} />}</Await>
    </Page>
  );
}

const TONE: Record<string, string> = { trained: "good", dropped: "warn", failed: "bad" };

function Whole({ run, view, turn }: { run: string; view: EpisodeDetail; turn: string | null }) {
  const [isUnfolded, setUnfolded] = useState(false);
  const { row } = view;
  const chosen = turn !== null && /^\d+$/.test(turn) ? Math.min(Number(turn), view.turns.length - 1) : null;
  const lost = view.turns.filter(({ received }) => !received).length;
  const branches = view.turns.filter(({ branch }) => branch).length;
  return (
    <>
      <p class={`why ${TONE[row.state] ?? "info"}`}><Badge state={row.state} /> <SafeText text={view.why} inline /></p>
      <Section title="Facts">
        <Facts pairs={[
          ["Reward", number(row.reward)],
          ["Success", row.success === null ? null : row.success ? "yes" : "no"],
          ["Kind", <Filtered run={run} field="kind" value={row.kind} />],
          ["Task", <Filtered run={run} field="task" value={row.task} />],
          ["Group", row.group && <a href={to(run, "group", row.group)}><SafeText text={row.group} inline /></a>],
          [row.state === "trained" ? "Trained in step" : "Step", row.step === null ? null : <Filtered run={run} field="step" value={String(row.step)} />],
          ["Staleness", row.staleness === null ? null : plural(row.staleness, "version")],
          ["Client", <Filtered run={run} field="client" value={row.client} />],
          ["Code version", row.code_version && <Filtered run={run} field="code_version" value={row.code_version} />],
          ["Began", dateTime(row.began_at)],
          ["Took", duration(row.seconds)],
          ["Turns", <>{number(row.turns)}{lost > 0 && `, ${number(lost)} not received`}{branches > 0 && `, ${plural(branches, "branch", "branches")}`}</>],
          ["Sampled tokens", number(row.sampled_tokens)],
          ["Attempt", row.attempt > 0 ? number(row.attempt + 1) : null],
          ["Mode", row.mode === "train" ? null : words(row.mode)],
        ]} />
        {view.detail !== "" && <div class="detail"><h3>What the client said</h3><LongText text={view.detail} is_code fold={1500} /></div>}
      </Section>
      <Earned view={view} />
      {view.turns.length > 0 && (
        <Section title="Calls in time" aside={plural(view.turns.length, "call")}>
          <Gantt run={run} id={row.id} turns={view.turns} />
        </Section>
      )}
      <Section title="Conversation" aside={view.turns.length > 0 && (
        <button aria-pressed={isUnfolded} onClick={() => setUnfolded(!isUnfolded)}>{isUnfolded ? "Fold" : "Unfold"} tools and prompts</button>
      )}>
        {view.notes?.map((note) => <p key={note} class="note">{sentence(note)}</p>)}
        {view.turns.length > 0
          ? <Conversation run={run} id={row.id} turns={view.turns} chosen={chosen} isUnfolded={isUnfolded} rewards={view.call_rewards} />
          : !view.notes?.length && <Empty>No turn was recorded.</Empty>}
      </Section>
      {Object.keys(view.metadata).length > 0 && (
        <Section title="Metadata"><LongText text={pretty(view.metadata)} is_code fold={1500} /></Section>
      )}
    </>
  );
}

/** A note as a sentence of its own. */
function sentence(note: string) {
  return <SafeText text={`${note.charAt(0).toUpperCase()}${note.slice(1)}${/[.!?]$/.test(note) ? "" : "."}`} inline />;
}

function Earned({ view }: { view: EpisodeDetail }) {
  const calls = new Map(view.turns.map((turn, at) => [turn.call_id, at]));
  const named = Object.fromEntries(Object.entries(view.call_rewards).map(([call, reward]) => {
    const at = calls.get(call);
    return [at === undefined ? `call ${call} (not kept)` : `turn ${at + 1}`, reward];
  }));
  const byPolicy = Object.entries(view.agent_rewards);
  const agents = Object.fromEntries(byPolicy.flatMap(([policy, rewards]) =>
    Object.entries(rewards).map(([agent, reward]) => [byPolicy.length > 1 ? `${agent} (${policy})` : agent, reward])));
  const tables: [string, Numbers][] = [
    ["Reward by policy", view.rewards], ["Reward by agent", agents], ["Reward by call", named], ["Metrics", view.metrics],
  ];
  const known = tables.filter(([, values]) => Object.keys(values).length > 0);
  if (known.length === 0) return null;
  return (
    <Section title="Rewards and metrics">
      <div class="earned">
        {known.map(([title, values]) => (
          <table key={title}>
            <caption>{title}</caption>
            <tbody>
              {Object.entries(values).map(([name, value]) => (
                <tr key={name}><th scope="row"><SafeText text={name} inline /></th><td class="number">{number(value)}</td></tr>
              ))}
            </tbody>
          </table>
        ))}
      </div>
    </Section>
  );
}
