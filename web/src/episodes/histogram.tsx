// A histogram in SVG. Bars with an address are links, so they work by mouse, by keyboard and for screen readers.
import { number } from "../format";
import type { Histogram } from "../types";

const WIDTH = 420;
const HEIGHT = 96;
const FOOT = 16;

export function Bars({ title, of, href, is_whole = false }: {
  title: string;
  of: Histogram;
  href?: (low: number, high: number, isLast: boolean) => string; // where a bar leads
  is_whole?: boolean; // values are whole numbers; edges lie between them
}) {
  const total = of.counts.reduce((sum, count) => sum + count, 0);
  const top = Math.max(1, ...of.counts);
  const width = WIDTH / Math.max(1, of.counts.length);
  const first = (edge: number) => (is_whole ? Math.ceil(edge) + 0 : edge); // + 0: never −0
  const last = (edge: number) => (is_whole ? Math.ceil(edge) - 1 : edge);
  const label = (at: number) => {
    const low = first(of.edges[at] ?? 0);
    const high = last(of.edges[at + 1] ?? low);
    return is_whole && low === high ? number(low) : `${number(low)} to ${number(high)}`;
  };
  return (
    <figure class="bars">
      {total === 0 ? <p class="quiet-text bars-none">No episode here has one.</p> : (
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT + FOOT}`} role="group" aria-label={`${title}, ${of.counts.length} bars`}>
          {of.counts.map((count, at) => {
            const height = count === 0 ? 0 : Math.max(2, (count / top) * (HEIGHT - 12));
            const text = `${title} ${label(at)}: ${number(count)} ${count === 1 ? "episode" : "episodes"}`;
            const bar = (
              <>
                <title>{text}</title>
                <rect class="bar-hit" x={at * width} y={0} width={width} height={HEIGHT} />
                <rect class="bar" x={at * width + 1} y={HEIGHT - height} width={Math.max(1, width - 2)} height={height} rx={1.5} />
              </>
            );
            return href !== undefined && count > 0
              ? <a key={at} href={href(of.edges[at] ?? 0, of.edges[at + 1] ?? 0, at === of.counts.length - 1)} aria-label={text}>{bar}</a>
              : <g key={at} {...(count > 0 ? { role: "img", "aria-label": text } : { "aria-hidden": true })}>{bar}</g>;
          })}
          <line class="bar-axis" x1={0} x2={WIDTH} y1={HEIGHT + 0.5} y2={HEIGHT + 0.5} />
          <text class="bar-text" x={0} y={HEIGHT + FOOT - 2} aria-hidden="true">{number(first(of.edges[0] ?? 0))}</text>
          <text class="bar-text" x={WIDTH} y={HEIGHT + FOOT - 2} text-anchor="end" aria-hidden="true">
            {number(last(of.edges[of.edges.length - 1] ?? 0))}
          </text>
          <text class="bar-text" x={WIDTH} y={9} text-anchor="end" aria-hidden="true">most {number(top)}</text>
        </svg>
      )}
    </figure>
  );
}
