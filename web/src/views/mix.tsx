// Kinds of tasks: what share of each batch they should have, what share they got, and how many of their groups teach nothing.
import { url, useApi } from "../api";
import { number, percent, plural } from "../format";
import { to } from "../router";
import type { Mix } from "../types";
import { Chart, series } from "../ui/chart";
import type { Line } from "../ui/chart";
import { Page, Section } from "../ui/parts";
import { Await, Empty, Indexing, whileIndexed } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

const NEWEST = 20; // steps that a kind's present share is averaged over

export function MixView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const mix = useApi<Mix>(url("runs", run, "mix"), { live: run, on: ["steps", "episodes"], restS: 5, everyS: whileIndexed });
  return (
    <Page title="Mix and kinds">
      <Await of={mix}>
        {(data) => data.steps.length === 0 ? <Empty>No step yet: shares are known from the first one.</Empty> : <MixPage run={run} mix={data} />}
      </Await>
    </Page>
  );
}

function MixPage({ run, mix }: { run: string; mix: Mix }) {
  const percents = { format: percent, yFormat: percent, sync: "mix", range: [0, null] as [number, null] };
  const shares = mix.kinds.flatMap((kind, at): Line[] => [
    { label: kind, values: mix.trained[kind] ?? [], colour: series(at) },
    ...(mix.target[kind] ? [{ label: `${kind}, target`, values: mix.target[kind], colour: series(at), dash: [4, 4] }] : []),
  ]);
  const flat = mix.kinds.filter((kind) => mix.flat[kind]).map((kind): Line => (
    { label: kind, values: mix.flat[kind] ?? [], colour: series(mix.kinds.indexOf(kind)) }
  ));
  return (
    <>
      <Section title={`Mean of the newest ${plural(Math.min(NEWEST, mix.steps.length), "step")}`}>
        <Table label="Kinds" rows={mix.kinds} rowKey={(kind) => kind} columns={[
          { key: "kind", head: "Kind", cell: (kind) => <a href={to(run, "episodes", "", { kind })}><SafeText text={kind} inline /></a> },
          { key: "target", head: "Target share", is_number: true, cell: (kind) => percent(mean(mix.target[kind])) },
          { key: "trained", head: "Share of trained groups", is_number: true, cell: (kind) => percent(mean(mix.trained[kind])) },
          { key: "flat", head: "Flat groups", is_number: true, title: "Groups whose attempts all got the same reward", cell: (kind) => (
            <a href={to(run, "episodes", "", { kind, state: "dropped", reason: "equal_rewards" })}>{percent(mean(mix.flat[kind]))}</a>
          ) },
          { key: "rate", head: "Steps", is_number: true, cell: (kind) => number((mix.trained[kind] ?? []).filter((value) => value !== null).length) },
        ]} />
      </Section>
      <Section title="Share of each batch" note={<>Solid: trained. Dashed: the target, which is <code>mix</code> and its schedule.</>}>
        <Chart label="Share of each batch by kind" x={mix.steps} lines={shares} height={230} {...percents} />
      </Section>
      {!mix.index.is_done && <Indexing index={mix.index} />}
      {flat.length > 0 && (
        <Section title="Flat groups" note="Groups whose attempts all got the same reward teach nothing: near 100 % a kind is too hard or solved.">
          <Chart label="Share of flat groups by kind" x={mix.steps} lines={flat} height={230} {...percents} />
        </Section>
      )}
    </>
  );
}

function mean(values: (number | null)[] | undefined): number | null {
  const known = (values ?? []).slice(-NEWEST).filter((value): value is number => value !== null);
  return known.length === 0 ? null : known.reduce((a, b) => a + b, 0) / known.length;
}
