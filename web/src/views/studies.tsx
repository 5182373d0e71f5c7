// Studies: all of them, and one with its comparisons, curves, budget and trials.
import { useMemo } from "preact/hooks";
import { url, useApi } from "../api";
import { number, percent, plural } from "../format";
import { link } from "../router";
import type { Study, StudyEntry } from "../types";
import { Chart, series } from "../ui/chart";
import { Age, Badge, Facts, Meter, Page, Section } from "../ui/parts";
import type { Tone } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

const TONES: Record<string, Tone> = {
  complete: "good", rule: "good", better: "good", accepted: "good", budget: "warn", asked: "warn", worse: "bad", refused: "warn", unreadable: "bad", parked: "bad",
};

function State({ state }: { state: string }) {
  return <Badge state={state} {...(TONES[state] ? { tone: TONES[state] } : {})} />;
}

export function Studies() {
  const studies = useApi<{ studies: StudyEntry[] }>(url("studies"), { everyS: 15 });
  return (
    <Page title="Studies">
      <Await of={studies} what="Looking for studies">
        {({ studies: rows }) => rows.length === 0 ? (
          <Empty>No study in the folders that the dashboard was given. <code>swarmq study new NAME</code> writes a study file to start from.</Empty>
        ) : (
          <Section title={rows.length === 1 ? "1 study" : `${rows.length} studies`}>
            <Table label="Studies" rows={rows} rowKey={({ id }) => id} columns={[
              { key: "name", head: "Study", cell: ({ id, name, folder, error }) => (
                <span class="stack">
                  {error === "" ? <a class="strong" href={link(null, "study", "", { id })}><SafeText text={name} inline /></a> : <b><SafeText text={name} inline /></b>}
                  <span class="quiet-text small"><SafeText text={folder} inline /></span>
                </span>
              ) },
              { key: "question", head: "Question", cell: ({ question, error }) => <SafeText text={error || question} inline /> },
              { key: "state", head: "State", cell: ({ state }) => <State state={state} /> },
              { key: "results", head: "Results", cell: ({ results, trials }) => (
                <span class="run-progress">
                  <span>{number(results)} of {plural(trials, "trial")}</span>
                  {trials > 0 && <Meter share={results / trials} label="Results" />}
                </span>
              ) },
              { key: "at", head: "Last entry", cell: ({ at }) => <span class="nowrap"><Age at={at} /></span> },
            ]} />
          </Section>
        )}
      </Await>
    </Page>
  );
}

export function StudyPage({ id }: { id: string }) {
  const study = useApi<Study>(url("studies", id), { everyS: 5 });
  return (
    <Await of={study} what="Reading the ledger">
      {(shown) => (
        <Page title={<SafeText text={shown.name} inline />} aside={<State state={shown.state} />}>
          <p><SafeText text={shown.question} inline /></p>
          <Facts pairs={[
            ["Metric", <SafeText text={shown.metric} inline />],
            ["Smallest effect that matters", number(shown.smallest_effect, 3)],
            ["Results", `${newest(shown).filter(({ state }) => state === "done").length} of ${plural(newest(shown).length, "trial")}`],
            ["Last entry", <Age at={shown.at} />],
            ["Stopped", shown.reason && <SafeText text={shown.reason} inline />],
          ]} />
          <Comparisons study={shown} />
          <Curves study={shown} />
          <Budget study={shown} />
          {shown.proposals.length > 0 && <Proposals study={shown} />}
          <Trials study={shown} />
        </Page>
      )}
    </Await>
  );
}

const newest = ({ trials }: Study) => trials.filter(({ is_newest }) => is_newest);

function Comparisons({ study }: { study: Study }) {
  if (study.comparisons === null) {
    return <Section title="Against the baseline"><Empty>Comparisons need <code>pip install 'swarmq[studies]'</code> where the dashboard runs.</Empty></Section>;
  }
  if (study.comparisons.length === 0) {
    return <Section title="Against the baseline"><Empty>There is nothing to compare yet.</Empty></Section>;
  }
  return (
    <Section title="Against the baseline" note={`So far, seed by seed: ${percent(study.level)} intervals, and p after Holm's correction.`}>
      <Table label="Comparisons" rows={study.comparisons} rowKey={({ arm }) => arm} columns={[
        { key: "arm", head: "Arm", cell: ({ arm }) => <b class="stack"><SafeText text={arm} inline /></b> },
        { key: "verdict", head: "Verdict", cell: ({ verdict }) => <State state={verdict} /> },
        { key: "n", head: "Seeds", is_number: true, cell: ({ seeds }) => number(seeds) },
        { key: "mean", head: "Difference", is_number: true, cell: ({ mean }) => (mean === null ? "–" : number(mean, 3)) },
        { key: "interval", head: "Interval", cell: ({ low, high }) => (low === null || high === null ? "unbounded" : `${number(low, 3)} to ${number(high, 3)}`) },
        { key: "p", head: "p", is_number: true, cell: ({ p }) => (p < 0.001 ? "< 0.001" : number(p, 3)) },
      ]} />
    </Section>
  );
}

function Curves({ study }: { study: Study }) {
  const charts = useMemo(() => study.curves.map(({ y, lines }) => {
    const length = Math.max(...lines.map(({ values }) => values.length));
    const whole = (values: number[]): (number | null)[] => Array.from({ length }, (_, at) => values[at] ?? null);
    return {
      y, x: Array.from({ length }, (_, at) => at + 1),
      lines: lines.map(({ label, values, low, high }, at) => ({
        label, values: whole(values), colour: series(at), ...(low.length > 0 && { low: whole(low), high: whole(high) }),
      })),
    };
  }), [study.curves]);
  if (charts.length === 0) return null;
  return (
    <Section title="Curves" note="Mean over seeds; bands hold the mean at each step by itself.">
      <div class="charts">
        {charts.map(({ y, x, lines }) => (
          <section key={y} class="section card" aria-label={y}>
            <h2><SafeText text={y} inline /></h2>
            <Chart label={y} x={x} lines={lines} sync="study" height={220} />
          </section>
        ))}
      </div>
    </Section>
  );
}

function Budget({ study }: { study: Study }) {
  return (
    <Section title="Budget" note="Running trials have reserved the most that they may cost.">
      <Table label="Budget" rows={study.budget} rowKey={({ name }) => name} columns={[
        { key: "name", head: "What", cell: ({ name }) => name },
        { key: "spent", head: "Spent", is_number: true, cell: ({ spent }) => number(spent, 4) },
        { key: "reserved", head: "Reserved", is_number: true, cell: ({ reserved }) => number(reserved, 4) },
        { key: "cap", head: "Cap", is_number: true, cell: ({ cap }) => (cap === null ? "none" : number(cap)) },
        { key: "share", head: "Used", cell: ({ name, spent, reserved, cap }) => cap !== null && <Meter share={(spent + reserved) / cap} label={name} /> },
      ]} />
    </Section>
  );
}

function Proposals({ study }: { study: Study }) {
  return (
    <Section title="Planner">
      <Table label="Proposals" rows={study.proposals} rowKey={({ arm }, at) => `${at} ${arm}`} columns={[
        { key: "arm", head: "Arm", cell: ({ arm }) => <span class="stack"><SafeText text={arm || "answer"} inline /></span> },
        { key: "decision", head: "Decision", cell: ({ decision }) => <State state={decision} /> },
        { key: "by", head: "By", cell: ({ by }) => <SafeText text={by} inline /> },
        { key: "reason", head: "Reason", cell: ({ reason }) => <span class="reason"><SafeText text={reason} inline /></span> },
      ]} />
    </Section>
  );
}

function Trials({ study }: { study: Study }) {
  return (
    <Section title="Trials">
      <Table label="Trials" rows={study.trials} rowKey={({ id }) => id} columns={[
        { key: "arm", head: "Arm", cell: ({ arm, is_noise }) => <span class="stack"><SafeText text={arm} inline />{is_noise && <span class="quiet-text small">A/A</span>}</span> },
        { key: "seed", head: "Seed", is_number: true, cell: ({ seed }) => number(seed) },
        ...(study.has_rungs ? [{ key: "rung", head: "Rung", is_number: true, cell: ({ rung }: Study["trials"][number]) => number(rung) }] : []),
        { key: "state", head: "State", cell: ({ state, is_newest }) => <span><State state={state} />{!is_newest && <span class="quiet-text"> before an amendment</span>}</span> },
        { key: "value", head: "Metric", is_number: true, cell: ({ value }) => (value === null ? "" : number(value, 3)) },
        { key: "gpu", head: "GPU s", is_number: true, cell: ({ gpu_seconds }) => (gpu_seconds === null ? "" : number(gpu_seconds, 3)) },
        { key: "failures", head: "Failed starts", is_number: true, cell: ({ failures }) => (failures === 0 ? "" : number(failures)) },
        { key: "worker", head: "Worker, or why parked", cell: ({ worker, reason }) => (worker || reason) && <span class={worker ? "" : "reason"}><SafeText text={worker || reason} inline /></span> },
      ]} />
    </Section>
  );
}
