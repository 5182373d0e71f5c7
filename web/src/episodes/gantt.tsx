// The calls of an episode in time: waiting for the first token, then sampling. A bar opens its turn.
import { duration, plural } from "../format";
import { to } from "../router";
import type { TurnView } from "../types";
import { place, ticks } from "./spans";

const WIDTH = 1000;
const ROW = 18;
const HEAD = 20;

export function Gantt({ run, id, turns }: { run: string; id: string; turns: TurnView[] }) {
  const { spans, lanes, total } = place(turns);
  if (spans.length === 0) return <p class="quiet-text">No times are recorded.</p>;
  const x = (seconds: number) => (total > 0 ? (seconds / total) * WIDTH : 0);
  const agents = [...new Set(spans.map(({ turn }) => turn.agent))];
  const height = HEAD + lanes * ROW + 4;
  return (
    <figure class="gantt">
      <div class="gantt-scroll" tabIndex={0} role="region" aria-label="Calls in time">
        <svg viewBox={`0 0 ${WIDTH} ${height}`} height={height} preserveAspectRatio="none" role="group" aria-label={`${plural(spans.length, "call")} in ${duration(total)}`}>
          {ticks(total).map((at) => <line key={at} class="gantt-line" x1={x(at)} x2={x(at)} y1={HEAD - 4} y2={height} />)}
          {spans.map((span) => {
            const { turn, index, start, first, end, lane } = span;
            const text = `Turn ${index + 1}${turn.agent ? ` of ${turn.agent}` : ""}: began after ${duration(start)}, first token after ${duration(turn.first_token_s)}, took ${duration(turn.total_s)}${turn.received ? "" : ", not received"}`;
            const y = HEAD + lane * ROW + 3;
            return (
              <a key={index} href={to(run, "episode", id, { turn: index })} aria-label={text}>
                <title>{text}</title>
                <rect class="gantt-hit" x={0} y={y - 3} width={lanes === spans.length ? WIDTH : 0} height={ROW} />
                <rect class="gantt-wait" x={x(start)} y={y} width={Math.max(x(first) - x(start), 0)} height={ROW - 6} />
                <rect class={turn.received ? `gantt-run agent-${agents.indexOf(turn.agent) % 6}` : "gantt-lost"} x={x(first)} y={y}
                      width={Math.max(x(end) - x(first), 3)} height={ROW - 6} />
              </a>
            );
          })}
        </svg>
        <div class="gantt-ticks" aria-hidden="true">
          {ticks(total).map((at) => <span key={at} style={{ left: `${(x(at) / WIDTH) * 100}%` }}>{duration(at)}</span>)}
        </div>
      </div>
      <figcaption class="legend">
        <span><i class="key-wait" /> waiting for the first token</span>
        {agents.slice(0, 6).map((agent, at) => <span key={at}><i class={`key-agent-${at % 6}`} /> {agent || "sampling"}</span>)}
        {spans.some(({ turn }) => !turn.received) && <span><i class="key-lost" /> answer not received</span>}
      </figcaption>
    </figure>
  );
}
