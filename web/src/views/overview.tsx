// The first page of a run: what is wrong, where work piles up, how far it is.
import { url, useApi } from "../api";
import { embedded } from "../embedded";
import { Download } from "../episodes/download";
import { duration, number, plural, words } from "../format";
import { to } from "../router";
import type { Alarm, LedgerView, Overview, Progress } from "../types";
import { Age, Meter, Page, Section } from "../ui/parts";
import { Await, Empty, Indexing, whileIndexed } from "../ui/states";
import { SafeText } from "../ui/text";
import { Beside, sum } from "./ledger";
import { Pipeline } from "./pipeline";

export function OverviewView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const overview = useApi<Overview>(url("runs", run, "overview"), { live: run, everyS: whileIndexed });
  return (
    <Page title="Overview" aside={overview.data && (
      <>
        {embedded === null && overview.data.at !== null && <span>{overview.data.is_live ? "As of " : "Last heard of "}<Age at={overview.data.at} /></span>}
        <Download run={run} kind="report" />
      </>
    )}>
      <Await of={overview} what="Reading the run">
        {(data) => (
          <>
            <Alarms run={run} alarms={data.alarms} isLive={data.is_live} />
            {embedded === null && (
              <Section title="Pipeline" aside={data.is_live ? undefined : "as it was last recorded"}>
                <Pipeline run={run} nodes={data.nodes} bottleneck={data.bottleneck} />
              </Section>
            )}
            <div class="columns">
              <Section title="Progress"><ProgressList run={run} progress={data.progress} isLive={data.is_live} /></Section>
              <Section title="Ledger" aside={<a href={to(run, "ledger")}>Every episode, by reason</a>}>
                {data.ledger === null ? <Indexing index={data.index} /> : (
                  <>
                    <LedgerLine run={run} ledger={data.ledger} />
                    <Beside run={run} ledger={data.ledger} />
                  </>
                )}
              </Section>
            </div>
          </>
        )}
      </Await>
    </Page>
  );
}

function Alarms({ run, alarms, isLive }: { run: string; alarms: Alarm[]; isLive: boolean }) {
  if (alarms.length === 0) {
    return <p class="all-well"><span class="badge good">No alarms</span>{isLive ? "Nothing is reported wrong." : "Nothing was reported wrong."}</p>;
  }
  return (
    <section class="alarms" aria-labelledby="alarms">
      <h2 id="alarms">{isLive ? plural(alarms.length, "alarm") : `${plural(alarms.length, "warning")} from while it ran`}</h2>
      <ul>
        {alarms.map((alarm) => (
          <li key={`${alarm.source} ${alarm.text}`} class="alarm">
            <p class="alarm-text"><SafeText text={alarm.text} inline /></p>
            <p class="alarm-from">
              <a href={to(run, "logs", `${alarm.source}.log`)}><SafeText text={alarm.source} inline /></a>
              <span>{alarm.times > 1 && `${number(alarm.times)} times, last `}<Age at={alarm.at} /></span>
            </p>
          </li>
        ))}
      </ul>
    </section>
  );
}

function ProgressList({ run, progress, isLive }: { run: string; progress: Record<string, Progress>; isLive: boolean }) {
  const policies = Object.entries(progress);
  if (policies.length === 0) return <Empty>No policy has made a step yet.</Empty>;
  return (
    <ul class="progress">
      {policies.map(([name, { step, max_steps, reward, step_s }]) => (
        <li key={name}>
          <div class="progress-head">
            <h3><a href={to(run, "curves", "", { policy: policies.length > 1 ? name : "" })}><SafeText text={name} inline /></a></h3>
            <span>
              step <b>{number(step)}</b>{max_steps ? ` of ${number(max_steps)}` : ""}
            </span>
          </div>
          {max_steps ? <Meter share={step / max_steps} label={`Steps of ${name}`} /> : null}
          <p class="progress-foot">
            <span>reward <b>{number(reward, 3)}</b></span>
            <span>{duration(step_s)} a step</span>
            {isLive && max_steps && step_s && step < max_steps ? <span>about {duration((max_steps - step) * step_s)} left</span> : null}
          </p>
        </li>
      ))}
    </ul>
  );
}

export function LedgerLine({ run, ledger }: { run: string; ledger: LedgerView }) {
  const terms: [string, number, Record<string, string>][] = [
    ["trained", ledger.trained, { state: "trained" }],
    ["dropped", sum(ledger.dropped), { state: "dropped" }],
    ["failed", sum(ledger.failed), { state: "failed" }],
    ["open", ledger.open, { state: "open" }],
    ["waiting", ledger.waiting, { state: "waiting" }],
    ["in learners", ledger.published, { state: "published" }],
  ];
  return (
    <p class="ledger-line">
      <a href={to(run, "episodes")}><b>{number(ledger.begun)}</b> begun</a> ={" "}
      {terms.map(([name, count, filter], at) => (
        <span key={name}>{at > 0 && " + "}<a href={to(run, "episodes", "", filter)}><b>{number(count)}</b> {words(name)}</a></span>
      ))}
      {ledger.begun !== terms.reduce((all, [, count]) => all + count, 0) && <span class="badge bad"> does not add up</span>}
    </p>
  );
}
