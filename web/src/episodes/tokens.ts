// Tokens of a timeline: columns that grow page by page, what each token's colour and words are, and which ones to look for.
import { number } from "../format";
import type { Cause, TokenPage } from "../types";

export type Quantity = "mask" | "advantage" | "logprob" | "ratio" | "version" | "entropy";

export const QUANTITIES: readonly (readonly [Quantity, string])[] = [
  ["mask", "What happened to it"], ["advantage", "Advantage"], ["logprob", "Log-probability"], ["ratio", "Ratio"],
  ["version", "Weight version"], ["entropy", "Entropy"],
];

export const CAUSES: Record<Cause, { label: string; words: string }> = {
  given: { label: "given", words: "Given: part of the prompt, not sampled by the policy, so it is not trained." },
  trained: { label: "trained", words: "Trained: its log-probability weighs in the loss." },
  clipped: { label: "clipped", words: "Clipped: its ratio left the trust region, so its gradient is 0 or is bounded." },
  masked: { label: "masked", words: "Masked by the loss: its probability has already moved far enough, so its gradient is 0." },
  filtered: { label: "filtered", words: "Left out by a filter." },
  no_advantage: { label: "no advantage", words: "Sampled, but its advantage is 0: it teaches nothing." },
  not_trained: { label: "not trained", words: "Sampled, but not trained." },
};

/** Causes worth a look of their own, in this order. */
export const NOTABLE: readonly Cause[] = ["clipped", "masked", "filtered"];

const COLUMNS = ["text", "id", "cause", "cause_detail", "logprob", "logprob_trained", "advantage", "ratio", "entropy", "version", "turn"] as const;

/** The tokens read so far: always a beginning of the timeline. */
export interface Columns {
  total: number;
  timelines: number;
  policy: string;
  notes: string[];
  isDecoded: boolean;
  text: string[];
  id: number[];
  cause: Cause[];
  cause_detail: string[];
  logprob: (number | null)[];
  logprob_trained: (number | null)[];
  advantage: (number | null)[];
  ratio: (number | null)[];
  version: (number | null)[];
  turn: (number | null)[];
  entropy: (number | null)[];
}

export function empty(): Columns {
  return {
    total: 0, timelines: 0, policy: "", notes: [], isDecoded: true, text: [], id: [], cause: [], cause_detail: [], logprob: [], logprob_trained: [], advantage: [],
    ratio: [], version: [], turn: [], entropy: [],
  };
}

/** Append a page; one that does not follow what is there is ignored. */
export function append(columns: Columns, page: TokenPage): Columns {
  if (page.positions[0] !== columns.id.length) return columns;
  const grown: Record<string, unknown> = {
    total: page.total, timelines: page.timelines, policy: page.policy ?? "", notes: page.notes ?? [],
    isDecoded: page.text.some((text) => text !== "") || (columns.id.length > 0 && columns.isDecoded),
  };
  for (const name of COLUMNS) grown[name] = (columns[name] as unknown[]).concat(page[name]);
  return grown as unknown as Columns;
}

/** Largest finite size of a column's values, at least `least`. */
export function largest(values: readonly (number | null)[], least = 1e-9): number {
  let found = least;
  for (const value of values) if (value !== null && Number.isFinite(value)) found = Math.max(found, Math.abs(value));
  return found;
}

export interface Paint { tone: string; strength: number } // class of the colour, and how strong it is from 0 to 1

export const NO_PAINT: Paint = { tone: "", strength: 0 };

export interface Scale { paint: (at: number) => Paint; legend: { tone: string; strength: number; label: string }[] }

/** How to colour by a quantity, with the legend that explains it. */
export function scale(columns: Columns, quantity: Quantity): Scale {
  switch (quantity) {
    case "mask":
      return {
        paint: (at) => ({ tone: `cause-${columns.cause[at] ?? "given"}`, strength: 0.5 }),
        legend: (Object.keys(CAUSES) as Cause[]).filter((cause) => columns.cause.includes(cause))
          .map((cause) => ({ tone: `cause-${cause}`, strength: 0.5, label: CAUSES[cause].label })),
      };
    case "advantage": {
      const top = largest(columns.advantage);
      return diverging(columns.advantage, (value) => value / top,
        [`made less likely (−${number(top, 2)})`, "0", `made likelier (+${number(top, 2)})`]);
    }
    case "ratio":
      return diverging(columns.ratio, (value) => (value > 0 ? Math.log2(value) : -1), ["halved since sampling", "1", "doubled"]);
    case "logprob":
      return sequential(columns.logprob, (value) => -value / 5, ["certain (0)", "surprising (−5 or less)"]);
    case "entropy": {
      const top = largest(columns.entropy);
      return sequential(columns.entropy, (value) => value / top, ["0", `uncertain (${number(top, 2)})`]);
    }
    case "version": {
      const known = [...new Set(columns.version.filter((value): value is number => value !== null))].sort((a, b) => a - b);
      const strengths = new Map(known.map((version, at) => [version, known.length === 1 ? 1 : 0.15 + 0.85 * at / (known.length - 1)]));
      const shown = known.length <= 6 ? known : [known[0], known[known.length - 1]] as number[];
      return {
        paint: (at) => {
          const version = columns.version[at] ?? null;
          return version === null ? NO_PAINT : { tone: "seq", strength: strengths.get(version) ?? 1 };
        },
        legend: shown.map((version) => ({ tone: "seq", strength: strengths.get(version) ?? 1, label: `version ${version}` })),
      };
    }
  }
}

function diverging(values: readonly (number | null)[], size: (value: number) => number, labels: [string, string, string]): Scale {
  return {
    paint: (at) => {
      const value = values[at] ?? null;
      if (value === null) return NO_PAINT;
      const share = Number.isFinite(value) ? Math.max(-1, Math.min(1, size(value))) : 1;
      return share === 0 ? { tone: "zero", strength: 0 } : { tone: share > 0 ? "up" : "down", strength: Math.abs(share) };
    },
    legend: [
      { tone: "down", strength: 1, label: labels[0] }, { tone: "zero", strength: 0, label: labels[1] },
      { tone: "up", strength: 1, label: labels[2] },
    ],
  };
}

function sequential(values: readonly (number | null)[], size: (value: number) => number, labels: [string, string]): Scale {
  return {
    paint: (at) => {
      const value = values[at] ?? null;
      return value === null ? NO_PAINT : { tone: "seq", strength: Math.max(0, Math.min(1, size(value))) };
    },
    legend: [{ tone: "seq", strength: 0, label: labels[0] }, { tone: "seq", strength: 1, label: labels[1] }],
  };
}

/** The chosen quantity by position, for the curve; gaps where it has no value. */
export function curveOf(columns: Columns, quantity: Quantity): (number | null)[] {
  if (quantity !== "mask") return columns[quantity];
  return columns.cause.map((cause) => (cause === "given" ? null : cause === "trained" ? 1 : 0));
}

/** Positions of tokens with a notable cause, by cause. */
export function notable(columns: Columns): Map<Cause, number[]> {
  const found = new Map<Cause, number[]>();
  columns.cause.forEach((cause, at) => {
    if (!NOTABLE.includes(cause)) return;
    const positions = found.get(cause);
    if (positions) positions.push(at);
    else found.set(cause, [at]);
  });
  return found;
}

/** First positions of the blocks in which tokens are drawn: a block ends at a line break if one comes in time. */
export function blocks(text: readonly string[], size = 256): number[] {
  const starts = [0];
  let start = 0;
  for (let at = 0; at < text.length; at++) {
    const length = at + 1 - start;
    if (length >= 2 * size || (length >= size && text[at]?.endsWith("\n"))) {
      if (at + 1 < text.length) starts.push(at + 1);
      start = at + 1;
    }
  }
  return starts;
}

/** The sentence about a token: what became of it and, where known, through what. */
export function explain(columns: Columns, at: number): string {
  const cause = CAUSES[columns.cause[at] ?? "given"];
  const detail = columns.cause_detail[at] ?? "";
  return detail === "" ? cause.words : `${cause.words.replace(/\.$/, "")} (${/^[a-z_]+$/.test(detail) ? detail.replaceAll("_", " ") : detail}).`;
}

/** What is drawn for a token: its text, or its id where no tokenizer could decode any. Empty within a character. */
export function textOf(columns: Columns, at: number): string {
  return columns.text[at] || (columns.isDecoded ? "" : `${columns.id[at]} `);
}
