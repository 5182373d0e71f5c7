// All episodes of a run, filtered, with the distribution of their rewards and of their staleness.
import "../episodes/episodes.css";
import { url, useApi, withQuery } from "../api";
import { embedded } from "../embedded";
import { describe, filterOf, options, STATES } from "../episodes/filter";
import type { Field } from "../episodes/filter";
import { Bars } from "../episodes/histogram";
import { usePages } from "../episodes/pages";
import { Filtered } from "../episodes/parts";
import { clock, dateTime, duration, number, plural, shortId, words } from "../format";
import { link, setQuery, to } from "../router";
import type { ClientView, EpisodeRow, Histogram, LedgerView, Mix, Overview } from "../types";
import { Badge, Page, Section, Select, TextField } from "../ui/parts";
import { Empty, Failed, Indexing, Loading } from "../ui/states";
import { VirtualTable } from "../ui/table";
import type { Column } from "../ui/table";
import { Name, SafeText } from "../ui/text";

const PAGE = 200;

export function Episodes({ run, query }: { run: string; arg: string; query: URLSearchParams }) {
  const filter = filterOf(query);
  const sort = query.get("sort") ?? "";
  const search = new URLSearchParams(filter);
  if (sort !== "") search.set("sort", sort);
  search.set("limit", String(PAGE));
  const chips = describe(filter);
  const pages = usePages(withQuery(url("runs", run, "episodes"), search), run);
  const histogram = (of: string) => withQuery(url("runs", run, "episodes", "histogram"), new URLSearchParams([...filter, ["of", of]]));
  const live = { live: run, on: ["episodes"] };
  const rewards = useApi<Histogram>(embedded ? null : histogram("reward"), live);
  const staleness = useApi<Histogram>(embedded ? null : histogram("staleness"), live);
  return (
    <Page title="Episodes" aside={<span role="status">{pages.isLoading && pages.rows.length === 0 ? "" : plural(pages.total, "episode")}</span>}>
      {embedded
        ? (
          <p class="note">
            This file holds a sample of the run's episodes: the newest of each state and reason.
            {chips.length > 0 && <> Shown are those with {chips.map(([, label, text]) => `${label.toLowerCase()} ${words(text)}`).join(", ")}. <a href={to(run, "episodes")}>Show all of the sample</a></>}
          </p>
        )
        : <Filters run={run} filter={filter} />}
      {rewards.data && staleness.data && (
        <div class="columns distributions">
          <Section title="Rewards" aside={`of ${plural(count(rewards.data), "episode")}`}>
            <Bars title="Reward" of={rewards.data}
                  href={(low, high, isLast) => link(run, "episodes", "", {
                    ...Object.fromEntries(filter), sort, reward_min: low, reward_max: isLast ? high : "", reward_below: isLast ? "" : high,
                    reward_above: "",
                  })} />
          </Section>
          <Section title="Staleness" aside={`versions between sampling and training, of ${plural(count(staleness.data), "episode")}`}>
            <Bars title="Staleness" of={staleness.data} is_whole />
          </Section>
        </div>
      )}
      {pages.index?.is_done === false && <Indexing index={pages.index} />}
      {pages.error && <Failed error={pages.error} retry={pages.reload} />}
      {pages.hasNews && <p class="state news" role="status">There are newer episodes. <button onClick={pages.reload}>Show them</button></p>}
      {pages.rows.length > 0 ? (
        <VirtualTable label="Episodes" rows={pages.rows} total={pages.total} columns={columns(run)} rowKey={(row) => row.id}
                      rowClass={(row) => `state-${row.state}`} sorted={sort === "" ? "-began_at" : sort}
                      onSort={(next) => setQuery({ sort: next })} onEnd={pages.more} />
      ) : pages.isLoading ? <Loading what="Reading episodes" /> : pages.error === null && (
        <Empty>
          {filter.size === 0 ? "No episode has begun yet." : <>No episode fits this filter. <a href={to(run, "episodes")}>Show all episodes</a></>}
        </Empty>
      )}
    </Page>
  );
}

function count({ counts }: Histogram): number {
  return counts.reduce((sum, one) => sum + one, 0);
}

function columns(run: string): Column<EpisodeRow>[] {
  return [
    { key: "id", head: "Episode", width: "8.2rem", cell: (row) => <a class="mono" href={to(run, "episode", row.id)} title={row.id}>{shortId(row.id)}</a> },
    { key: "began", head: "Began", sort: "began_at", width: "5.4rem", cell: (row) => <time title={dateTime(row.began_at)}>{clock(row.began_at)}</time> },
    { key: "state", head: "State", width: "6.5rem", cell: (row) => <Badge state={row.state} /> },
    { key: "reason", head: "Reason", width: "minmax(6.5rem, 1fr)", cell: (row) => <SafeText text={words(row.reason)} inline /> },
    { key: "reward", head: "Reward", sort: "reward", is_number: true, width: "5rem", cell: (row) => number(row.reward) },
    { key: "kind", head: "Kind", width: "minmax(5.5rem, 0.8fr)", cell: (row) => <SafeText text={row.kind} inline /> },
    { key: "task", head: "Task", width: "minmax(10rem, 1.6fr)", cell: (row) => <Filtered run={run} field="task" value={row.task} in_column /> },
    {
      key: "group", head: "Attempts", width: "5.5rem", title: "All attempts at the task in this epoch, side by side",
      cell: (row) => row.group === "" ? null : <a href={to(run, "group", row.group)} title={`Group ${row.group}`}>compare</a>,
    },
    { key: "turns", head: "Turns", sort: "turns", is_number: true, width: "4rem", cell: (row) => number(row.turns) },
    { key: "tokens", head: "Tokens", sort: "sampled_tokens", is_number: true, width: "4.8rem", title: "Tokens that the policy sampled", cell: (row) => number(row.sampled_tokens) },
    { key: "seconds", head: "Took", sort: "seconds", is_number: true, width: "5.2rem", cell: (row) => duration(row.seconds) },
    { key: "step", head: "Step", sort: "step", is_number: true, width: "3.8rem", cell: (row) => number(row.step) },
    { key: "stale", head: "Stale", sort: "staleness", is_number: true, width: "4rem", title: "Weight versions between the oldest sampled token and the training", cell: (row) => number(row.staleness) },
    { key: "client", head: "Client", width: "minmax(6rem, 1fr)", cell: (row) => <Name text={row.client} /> },
  ];
}

function Filters({ run, filter }: { run: string; filter: URLSearchParams }) {
  const ledger = useApi<Partial<LedgerView>>(url("runs", run, "ledger"));
  const mix = useApi<Mix>(url("runs", run, "mix"));
  const clients = useApi<{ clients: ClientView[] }>(url("runs", run, "clients"));
  const overview = useApi<Overview>(url("runs", run, "overview"));
  const value = (field: Field) => filter.get(field) ?? "";
  const change = (field: Field) => (next: string) => setQuery({ [field]: next.trim() }, true);
  const reasons = Object.keys({ ...ledger.data?.dropped, ...ledger.data?.failed }).sort();
  const policies = Object.keys(overview.data?.progress ?? {});
  const chips = describe(filter);
  const isMoreUsed = (["policy", "step", "group", "code_version", "mode", "text"] as Field[]).some((field) => filter.has(field));
  return (
    <section class="filters" aria-label="Filters" data-filter>
      <div class="controls">
        <Select label="State" value={value("state")} options={options(STATES, value("state"), words)} onChoose={change("state")} />
        <Select label="Reason" value={value("reason")} options={options(reasons, value("reason"), words)} onChoose={change("reason")} />
        <Select label="Kind" value={value("kind")} options={options(mix.data?.kinds ?? [], value("kind"))} onChoose={change("kind")} />
        <Select label="Client" value={value("client")} options={options(clients.data?.clients.map(({ client }) => client) ?? [], value("client"))}
                onChoose={change("client")} />
        <TextField label="Task" value={value("task")} onInput={change("task")} size={14} />
        <TextField label="Reward from" value={value("reward_min")} onInput={change("reward_min")} size={6} />
        <TextField label="Reward to" value={value("reward_max")} onInput={change("reward_max")} size={6} />
      </div>
      <details open={isMoreUsed}>
        <summary>More filters</summary>
        <div class="controls">
          {(policies.length > 1 || filter.has("policy")) && (
            <Select label="Policy" value={value("policy")} options={options(policies, value("policy"))} onChoose={change("policy")} />
          )}
          <Select label="Mode" value={value("mode")} options={options(["train", "eval"], value("mode"))} onChoose={change("mode")} />
          <TextField label="Step" value={value("step")} onInput={change("step")} size={6} />
          <TextField label="Code version" value={value("code_version")} onInput={change("code_version")} size={12} />
          <TextField label="Group" value={value("group")} onInput={change("group")} size={16} />
          <TextField label="Id contains" value={value("text")} onInput={change("text")} size={14} />
        </div>
      </details>
      {chips.length > 0 && (
        <ul class="chips" aria-label="Active filters">
          {chips.map(([field, label, text]) => (
            <li key={field}>
              <button class="chip" onClick={() => setQuery({ [field]: "" }, true)} aria-label={`Remove filter ${label} ${text}`}>
                <span class="quiet-text">{label}</span> <SafeText text={field === "state" || field === "reason" ? words(text) : text} inline /> <span aria-hidden="true">✕</span>
              </button>
            </li>
          ))}
          {chips.length > 1 && <li><a class="chip-clear" href={to(run, "episodes")}>Clear all</a></li>}
        </ul>
      )}
    </section>
  );
}
