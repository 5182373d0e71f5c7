// The JSON of the dashboard's API: the structs of swarmq.observe and swarmq.dashboard, field by field.

export type Numbers = Record<string, number>;

export interface RunEntry {
  id: string;
  run: string;
  folder: string;
  state: string;
  error: string;
  at: number | null;
  policies: Record<string, { step: number; max_steps: number | null; reward: number | null; at: number | null }>;
}

export interface Alarm { at: number; source: string; text: string; times: number }

export interface PipelineNode {
  id: string;
  label: string;
  depth: number | null;
  rate_per_s: number | null;
  oldest_s: number | null;
  state: "ok" | "busy" | "waiting" | "down" | "unknown";
  detail: string;
}

export interface LedgerView {
  begun: number;
  trained: number;
  open: number;
  waiting: number;
  published: number;
  dropped: Numbers;
  failed: Numbers;
  evaluated: Numbers; // not in `begun`
  stray: Numbers; // episodes whose begin never came, not in `begun`
  is_balanced: boolean;
  explanations: Record<string, string>;
}

/** How far the index of the episodes is; without it done, nothing counts episodes. */
export interface IndexProgress { episodes: number; share: number; is_done: boolean; notes: string[] }

/** An answer without its other fields until the index is done. */
export type Indexed<T> = (T & { index: IndexProgress & { is_done: true } }) | { index: IndexProgress & { is_done: false } };

export function isIndexed<T>(answer: Indexed<T>): answer is T & { index: IndexProgress & { is_done: true } } {
  return answer.index.is_done;
}

export interface Progress { step: number; max_steps: number | null; reward: number | null; step_s: number | null }

export interface Overview {
  at: number | null; // null if nothing was ever heard of the run
  is_live: boolean;
  alarms: Alarm[];
  nodes: PipelineNode[];
  bottleneck: { node: string; text: string } | null;
  ledger: LedgerView | null; // null until the index is done
  progress: Record<string, Progress>;
  index: IndexProgress;
}

export interface Mark { step: number; at: number; kind: string; text: string }

export interface Steps {
  policy: string;
  steps: number[];
  at: number[];
  series: Record<string, (number | null)[]>;
  names: string[];
  marks: Mark[];
}

export interface TimeView {
  lanes: { process: string; spans: [number, number, string][] }[];
  samples: Record<string, [number, number][]>;
}

export interface EpisodeRow {
  id: string;
  state: string;
  reason: string;
  mode: string;
  kind: string;
  task: string;
  slot: string;
  group: string;
  attempt: number;
  client: string;
  code_version: string;
  reward: number | null;
  success: boolean | null;
  turns: number;
  sampled_tokens: number;
  began_at: number;
  seconds: number | null;
  step: number | null;
  staleness: number | null;
  has_transcript: boolean;
}

export interface EpisodePage {
  index?: IndexProgress; // not in exported files
  rows: EpisodeRow[]; total: number; next: string | null
}
export interface Histogram { edges: number[]; counts: number[] }

export interface GroupView {
  group: string;
  kind: string;
  task: string;
  state: string;
  size: number;
  mean_reward: number | null;
  members: { row: EpisodeRow; advantage: number | null; why: string }[];
}

export interface Message { role: string; content?: unknown; [key: string]: unknown }

export interface TurnView {
  call_id: string;
  agent: string;
  policy: string;
  number: number;
  began_at: number;
  first_token_s: number | null;
  total_s: number | null;
  finish_reason: string;
  parent: string | null;
  begins: number | null;
  branch: string | null;
  repaired: number | boolean | null;
  received: boolean;
  prompt_tokens: number;
  sampled_tokens: number;
  versions: [number, number] | null;
  reward: number | null;
  advantage: number | null;
  messages: Message[];
}

export interface EpisodeDetail {
  row: EpisodeRow;
  rewards: Numbers;
  agent_rewards: Record<string, Numbers>; // policy -> agent -> reward
  call_rewards: Numbers;
  metrics: Numbers;
  metadata: Record<string, unknown>;
  detail: string;
  why: string;
  timelines: number;
  turns: TurnView[];
  notes?: string[]; // what could not be read
}

export type Cause = "given" | "trained" | "clipped" | "masked" | "filtered" | "no_advantage" | "not_trained";

export interface TokenPage {
  timeline: number;
  timelines: number;
  positions: [number, number];
  total: number;
  text: string[];
  id: number[];
  cause: Cause[];
  cause_detail: string[];
  logprob: (number | null)[];
  logprob_trained: (number | null)[];
  advantage: (number | null)[];
  ratio: (number | null)[];
  entropy: (number | null)[];
  version: (number | null)[];
  turn: (number | null)[];
  policy?: string;
  notes?: string[];
}

export interface ClientView {
  client: string;
  episodes: number;
  trained: number;
  failed: number;
  per_min: number | null;
  code_versions: { version: string; first_at: number; last_at: number; episodes: number }[];
  last_error: { at: number; text: string; episode: string } | null;
  is_revoked: boolean;
}

export interface Mix {
  index: IndexProgress;
  kinds: string[];
  steps: number[];
  target: Record<string, (number | null)[]>;
  trained: Record<string, (number | null)[]>;
  flat: Record<string, (number | null)[]>;
}

export interface PassAtK { value: number; low: number; high: number; tasks: number }

export interface Evaluations {
  index: IndexProgress;
  rounds: {
    at: number;
    version: number;
    seconds: number | null;
    missing: number;
    given_up: number;
    kinds: Record<string, { tasks: number; episodes: number; reward: number | null; pass: Record<string, PassAtK> }>;
  }[];
  matrix: { tasks: string[]; versions: number[]; cells: (number | null)[][] };
}

export interface Engines {
  is_live: boolean;
  at: number | null; // when the engines' state was recorded
  engines: {
    name: string;
    policy: string;
    url: string;
    version: number | null;
    state: string;
    running: number | null;
    waiting: number | null;
    kv: number | null;
  }[];
  pushes: { step: number; at: number; policy: string; method: string; push_s: number | null; pause_s: number | null }[];
}

export interface SettingsView {
  settings: { path: string; value: unknown; default: unknown; is_set: boolean }[];
  history: {
    number: number;
    path: string;
    before: unknown;
    value: unknown;
    from_step: number | null;
    at: number;
    sender: string;
  }[];
}

export interface SettingsDiff { runs: string[]; rows: { path: string; values: unknown[] }[] }
export interface LogFiles { files: { name: string; bytes: number }[] }
export interface LogText { name: string; text: string }
export interface DeadLetters { rows?: Record<string, unknown>[]; error?: string }
export interface Me { name: string; roles: string[]; base: string; can_operate: boolean }

export interface StudyEntry {
  id: string; name: string; folder: string; question: string; state: string; error: string; results: number; trials: number; at: number | null;
}

export interface Study {
  id: string; name: string; folder: string; question: string; metric: string; smallest_effect: number; state: string; reason: string; at: number;
  has_rungs: boolean; level: number; // of the intervals
  trials: {
    id: string; is_newest: boolean; // false: an amendment has removed it, or planned it anew
    arm: string; seed: number; rung: number; is_noise: boolean; state: string; value: number | null; gpu_seconds: number | null;
    failures: number; worker: string; reason: string;
  }[];
  budget: { name: string; spent: number; reserved: number; cap: number | null }[];
  proposals: { arm: string; decision: string; by: string; reason: string }[];
  comparisons: {
    arm: string; seeds: number; mean: number | null; low: number | null; high: number | null; p: number; verdict: string;
  }[] | null; // null where swarmq[studies] is not installed
  curves: { x: string; y: string; lines: { label: string; values: number[]; low: number[]; high: number[] }[] }[]; // no band: empty
}
