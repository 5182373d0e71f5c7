// Numbers, times and ages as people read them.

const MISSING = "–";

/** 1234567 -> "1,234,567"; 0.123456 -> "0.1235"; very small and very large ones in scientific notation. */
export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4
    ? value.toExponential(2).replace(/e\+?/, "e")
    : value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1000 ? 5 : digits });
  return text.replaceAll("-", "−");
}

/** 12345 -> "12.3 k": for axes and pictures, where space is short. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]] as const) {
    if (size >= limit) return `${number(value / (limit === 1e4 ? 1e3 : limit), 3)} ${unit}`;
  }
  return number(value, 3);
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || Number.isNaN(share)) return MISSING;
  const value = share * 100;
  return `${value !== 0 && Math.abs(value) < 1 ? value.toPrecision(1) : Math.round(value * 10) / 10} %`;
}

export function bytes(size: number): string {
  if (size < 1000) return `${size} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    size /= 1000;
    if (size < 1000 || unit === "GB") return `${size.toLocaleString("en-US", { maximumSignificantDigits: 3 })} ${unit}`;
  }
  return MISSING;
}

/** 0.0123 -> "12 ms", 75 -> "1 min 15 s", 90000 -> "1 d 1 h". */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return MISSING;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${Math.round(seconds * 10) / 10} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]] as const;
  const first = units.findIndex(([size]) => seconds >= size);
  const [size, unit] = units[first] ?? units[3];
  const whole = Math.floor(seconds / size);
  const next = units[first + 1];
  const rest = next === undefined ? 0 : Math.floor((seconds - whole * size) / next[0]);
  return `${whole} ${unit}${next !== undefined && rest > 0 ? ` ${rest} ${next[1]}` : ""}`;
}

/** "12 s ago"; `now` in seconds since 1970, for tests. */
export function ago(at: number | null | undefined, now = Date.now() / 1000): string {
  if (at === null || at === undefined || at <= 0) return MISSING;
  return now - at < 1 ? "just now" : `${duration(Math.max(1, Math.floor(now - at)))} ago`;
}

export function clock(at: number | null | undefined): string {
  return at === null || at === undefined ? MISSING : new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function dateTime(at: number | null | undefined): string {
  if (at === null || at === undefined || at <= 0) return MISSING;
  const date = new Date(at * 1000);
  const two = (n: number) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${date.toLocaleTimeString("en-GB")}`;
}

/** The last characters of an id: the first ones are the time and equal in all that begin together. */
export function shortId(id: string): string {
  return id.length <= 13 ? id : `…${id.slice(-12)}`;
}

/** States whose names say too little: an episode's "published", and "ended" of a run that is still up. */
const STATE_WORDS: Record<string, string> = { published: "in learners", ended: "last step made" };

/** "equal_rewards" -> "equal rewards". */
export function words(name: string): string {
  return STATE_WORDS[name] ?? name.replaceAll("_", " ");
}

/** A number's name in step events as a title: "push_s" -> "push, seconds", "tokens_per_s" -> "tokens per second". */
export function title(name: string): string {
  return words(name.replace(/_per_s$/, " per second").replace(/_s$/, ", seconds").replace(/_bytes$/, ", bytes"));
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** A setting's value as TOML writes it. */
export function literal(value: unknown): string {
  return value === null || value === undefined ? MISSING : JSON.stringify(value);
}
