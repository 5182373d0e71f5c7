// Every episode ever begun, accounted for: an equation whose numbers open the episodes that they count.
import { url, useApi } from "../api";
import { number, percent, plural, words } from "../format";
import { to } from "../router";
import { isIndexed } from "../types";
import type { Indexed, LedgerView, Numbers } from "../types";
import { Page, Section } from "../ui/parts";
import { Await, Empty, Indexing, whileIndexed } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

export const sum = (counts: Numbers): number => Object.values(counts).reduce((total, count) => total + count, 0);

interface Term { name: string; count: number; state: string; tone: string; means: string }

function terms(ledger: LedgerView): Term[] {
  return [
    { name: "trained", count: ledger.trained, state: "trained", tone: "good", means: "in a batch that a learner took a step on" },
    { name: "dropped", count: sum(ledger.dropped), state: "dropped", tone: "warn", means: "finished, but not trained; by reason below" },
    { name: "failed", count: sum(ledger.failed), state: "failed", tone: "bad", means: "raised, given up or never heard of again" },
    { name: "open", count: ledger.open, state: "open", tone: "quiet", means: "begun, not ended yet" },
    { name: "waiting", count: ledger.waiting, state: "waiting", tone: "quiet", means: "ended, waiting for the others of its group" },
    { name: "in learners", count: ledger.published, state: "published", tone: "quiet", means: "handed to a learner, not reported yet" },
  ];
}

export function Ledger({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const ledger = useApi<Indexed<LedgerView>>(url("runs", run, "ledger"), {
    live: run, on: ["episodes", "state", "steps"], restS: 2, everyS: whileIndexed,
  });
  return (
    <Page title="Ledger">
      <Await of={ledger}>
        {(data) => (
          !isIndexed(data) ? <Indexing index={data.index} />
            : data.begun === 0 ? <Empty>No episode has begun yet.</Empty> : <Book run={run} ledger={data} />
        )}
      </Await>
    </Page>
  );
}

function Book({ run, ledger }: { run: string; ledger: LedgerView }) {
  const parts = terms(ledger);
  const total = parts.reduce((all, { count }) => all + count, 0);
  const isSum = ledger.begun === total;
  return (
    <>
      <Section title="Every episode that ever began" aside={
        ledger.is_balanced ? <span class="badge good">adds up</span>
          : isSum ? <span class="badge quiet">adds up, not verified</span> : <span class="badge bad">does not add up</span>
      }>
        <div class="equation" role="group" aria-label="Begun episodes and what became of them">
          <a class="term total" href={to(run, "episodes")}>
            <span class="term-count">{number(ledger.begun)}</span><span class="term-name">begun</span>
          </a>
          {parts.map(({ name, count, state, tone, means }, at) => (
            <span key={name} class="term-pair">
              <span class="sign" aria-hidden="true">{at === 0 ? "=" : "+"}</span>
              <a class={`term ${tone}`} href={to(run, "episodes", "", { state })} title={means}>
                <span class="term-count">{number(count)}</span><span class="term-name">{name}</span>
              </a>
            </span>
          ))}
        </div>
        <div class="share-bar" aria-hidden="true">
          {parts.filter(({ count }) => count > 0).map(({ name, count, tone }) => (
            <span key={name} class={tone} style={{ flexGrow: count }} title={`${name}: ${percent(count / total)}`} />
          ))}
        </div>
        <Beside run={run} ledger={ledger} />
        {!ledger.is_balanced && (isSum ? (
          <p class="note">
            The sum could not be verified: the collector's own counters are missing, or name other reasons.
          </p>
        ) : (
          <p class="state failed">
            {plural(Math.abs(ledger.begun - total), "episode")} {ledger.begun > total ? "missing from" : "too many in"} this sum.
            If that stays, the index and the collector disagree: please report it.
          </p>
        ))}
      </Section>
      <Reasons run={run} title="Dropped, by reason" state="dropped" counts={ledger.dropped} of={ledger.begun} texts={ledger.explanations}
               none="No finished episode was dropped." />
      <Reasons run={run} title="Failed, by reason" state="failed" counts={ledger.failed} of={ledger.begun} texts={ledger.explanations}
               none="No episode failed." />
      {sum(ledger.evaluated) > 0 && (
        <Reasons run={run} title="Evaluated, by how they ended" state="eval" counts={ledger.evaluated} of={ledger.begun}
                 texts={ledger.explanations} none="" />
      )}
    </>
  );
}

/** What is counted apart, because it was never meant to be trained. */
export function Beside({ run, ledger }: { run: string; ledger: LedgerView }) {
  const evaluated = sum(ledger.evaluated);
  const stray = sum(ledger.stray ?? {});
  if (evaluated + stray === 0) return null;
  return (
    <p class="note">
      Beside these{" "}
      {evaluated > 0 && <><a href={to(run, "episodes", "", { state: "eval" })}>{plural(evaluated, "evaluation episode")}</a>, which are measured and never trained</>}
      {evaluated > 0 && stray > 0 && ", and "}
      {stray > 0 && <>{plural(stray, "episode")} of which messages came, but never a begin</>}.
    </p>
  );
}

function Reasons({ run, title, state, counts, of, texts, none }: {
  run: string; title: string; state: string; counts: Numbers; of: number; texts: Record<string, string>; none: string;
}) {
  const rows = Object.entries(counts).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  return (
    <Section title={title}>
      {rows.length === 0 ? <p class="note">{none}</p> : (
        <Table label={title} layout="reasons" rows={rows} rowKey={([reason]) => reason} columns={[
          { key: "reason", head: "Reason", cell: ([reason]) => <span class="nowrap"><SafeText text={words(reason)} inline /></span> },
          { key: "count", head: "Episodes", is_number: true, cell: ([reason, count]) => (
            <a href={to(run, "episodes", "", { state, reason })}>
              <b>{number(count)}</b><span class="sr"> {state} for {words(reason)}</span>
            </a>
          ) },
          { key: "share", head: "Share", is_number: true, cell: ([, count]) => percent(count / of) },
          { key: "why", head: "What it means", cell: ([reason]) => <span class="prose">{texts[reason] ?? ""}</span> },
        ]} />
      )}
    </Section>
  );
}
