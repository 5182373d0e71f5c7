// The calls of an episode on a time axis.
import type { TurnView } from "../types";

export interface Span { turn: TurnView; index: number; start: number; first: number; end: number; lane: number } // seconds since the first call

/** Place every call: a lane of its own while there are at most `most`, else the first lane that is free. */
export function place(turns: readonly TurnView[], most = 24): { spans: Span[]; lanes: number; total: number } {
  const timed = turns.map((turn, index) => ({ turn, index })).filter(({ turn }) => turn.began_at > 0);
  timed.sort((a, b) => a.turn.began_at - b.turn.began_at || a.index - b.index);
  const origin = timed[0]?.turn.began_at ?? 0;
  const ends: number[] = [];
  const spans = timed.map(({ turn, index }, order) => {
    const start = turn.began_at - origin;
    const end = start + Math.max(turn.total_s ?? 0, 0);
    let lane = order;
    if (timed.length > most) {
      lane = ends.findIndex((free) => free <= start);
      if (lane < 0) lane = ends.length;
      ends[lane] = end;
    }
    return { turn, index, start, first: Math.min(end, start + Math.max(turn.first_token_s ?? 0, 0)), end, lane };
  });
  const lanes = timed.length > most ? ends.length : timed.length;
  return { spans, lanes, total: spans.reduce((latest, span) => Math.max(latest, span.end), 0) };
}

/** About `count` round numbers from 0 to `total`. */
export function ticks(total: number, count = 5): number[] {
  if (!(total > 0)) return [0];
  const rough = total / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  const found: number[] = [];
  for (let at = 0; at <= total * 1.0001; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}
