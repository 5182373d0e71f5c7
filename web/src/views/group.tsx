// The attempts at one task side by side: what each earned, what the learner made of it, and why.
import "../episodes/episodes.css";
import { useState } from "preact/hooks";
import { url, useApi } from "../api";
import { read } from "../episodes/message";
import { Filtered, LongText, Signed } from "../episodes/parts";
import { largest } from "../episodes/tokens";
import { dateTime, duration, number, plural, shortId, words } from "../format";
import { to } from "../router";
import type { EpisodeDetail, GroupView } from "../types";
import { Badge, Facts, Page, Section } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { SafeText } from "../ui/text";
import { Download } from "../episodes/download";

export function Group({ run, arg }: { run: string; arg: string; query: URLSearchParams }) {
  const group = useApi<GroupView>(arg === "" ? null : url("runs", run, "groups", arg), { live: run, on: ["episodes"] });
  if (arg === "") return <Page title="Group"><Empty>Open a group from <a href={to(run, "episodes")}>the list of episodes</a>.</Empty></Page>;
  return (
    <Page title={<>Group <SafeText text={arg} inline /></>} aside={<Download run={run} kind="group" id={arg} />}>
      <Await of={group} what="Reading the group">{(view) => <Attempts run={run} view={view} />}</Await>
    </Page>
  );
}

type Member = GroupView["members"][number];

function Attempts({ run, view }: { run: string; view: GroupView }) {
  const [isComparing, setComparing] = useState(false);
  const rewards = view.members.map(({ row }) => row.reward);
  const scaled = largest([...rewards, view.mean_reward]);
  const top = largest(view.members.map(({ advantage }) => advantage));
  return (
    <>
      <Section title={`${plural(view.members.length, "attempt")} of ${number(view.size)}`}
               aside={<Badge state={view.state} />}>
        <Facts pairs={[
          ["Task", <Filtered run={run} field="task" value={view.task} />],
          ["Kind", <Filtered run={run} field="kind" value={view.kind} />],
          ["Mean reward", number(view.mean_reward)],
        ]} />
        <Strip rewards={rewards} mean={view.mean_reward} />
      </Section>
      <div class="attempts-head">
        <h2>Attempts</h2>
        <button aria-pressed={isComparing} onClick={() => setComparing(!isComparing)}>{isComparing ? "Hide" : "Compare"} last answers</button>
      </div>
      <ol class="attempts">
        {view.members.map((member, at) => (
          <Attempt key={member.row.id} run={run} member={member} at={at} scaled={scaled} top={top} isComparing={isComparing} />
        ))}
      </ol>
    </>
  );
}

function Attempt({ run, member, at, scaled, top, isComparing }: {
  run: string; member: Member; at: number; scaled: number; top: number; isComparing: boolean;
}) {
  const { row, advantage, why } = member;
  return (
    <li class={`attempt state-${row.state}`} data-row>
      <header>
        <h3><a href={to(run, "episode", row.id)} title={row.id}>{number(at + 1)} · <span class="mono">{shortId(row.id)}</span></a></h3>
        <Badge state={row.state} />
      </header>
      <p class="attempt-why"><SafeText text={why || words(row.reason)} inline /></p>
      <dl class="attempt-numbers">
        <dt>Reward</dt><dd><Signed value={row.reward} top={scaled} label="Reward" /></dd>
        <dt>Advantage</dt><dd><Signed value={advantage} top={top} label="Advantage" sign /></dd>
      </dl>
      <p class="quiet-text attempt-facts">
        {plural(row.turns, "turn")} · {plural(row.sampled_tokens, "token")} · {duration(row.seconds)}
        {row.step !== null && <> · step {number(row.step)}</>}
        {row.attempt > 0 && <> · try {number(row.attempt + 1)}</>}
      </p>
      <p class="quiet-text attempt-facts">
        <time>{dateTime(row.began_at)}</time> · <Filtered run={run} field="client" value={row.client} />
      </p>
      {isComparing && <LastAnswer run={run} id={row.id} />}
      <p class="attempt-links">
        <a href={to(run, "episode", row.id)}>Conversation</a>
        <a href={to(run, "tokens", row.id)}>Tokens</a>
      </p>
    </li>
  );
}

function LastAnswer({ run, id }: { run: string; id: string }) {
  const detail = useApi<EpisodeDetail>(url("runs", run, "episodes", id));
  return (
    <div class="last-answer">
      <Await of={detail} what="Reading">
        {({ turns }) => {
          const message = turns.at(-1)?.messages.at(-1);
          const said = message === undefined ? null : read(message);
          return said === null || (said.text === "" && said.calls.length === 0)
            ? <p class="quiet-text">No answer is kept.</p>
            : <LongText text={said.text || said.calls.map(({ name, args }) => `${name}(${args})`).join("\n")} fold={800} />;
        }}
      </Await>
    </div>
  );
}

/** Rewards of all attempts on one axis, with their mean. */
function Strip({ rewards, mean }: { rewards: (number | null)[]; mean: number | null }) {
  const known = rewards.filter((reward): reward is number => reward !== null);
  if (known.length === 0) return null;
  const low = Math.min(0, ...known);
  const high = Math.max(low + 1e-9, 1e-9, ...known);
  const x = (value: number) => 10 + ((value - low) / (high - low)) * 380;
  const equal = known.every((reward) => reward === known[0]);
  return (
    <figure class="strip">
      <svg viewBox="0 0 400 44" role="img" aria-label={`Rewards ${known.map((reward) => number(reward)).join(", ")}; mean ${number(mean)}`}>
        <line class="bar-axis" x1={10} x2={390} y1={22} y2={22} />
        {mean !== null && <line class="strip-mean" x1={x(mean)} x2={x(mean)} y1={6} y2={30} />}
        {known.map((reward, at) => <circle key={at} class="strip-dot" cx={x(reward)} cy={22} r={6} />)}
        <text class="bar-text" x={10} y={42}>{number(low)}</text>
        <text class="bar-text" x={390} y={42} text-anchor="end">{number(high)}</text>
      </svg>
      {equal && known.length > 1 && (
        <figcaption class="note">All rewards are equal, so no attempt is better than another and the group teaches nothing.</figcaption>
      )}
    </figure>
  );
}
