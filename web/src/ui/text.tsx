// Foreign text: whatever agents, tools and tasks wrote. It only ever becomes text nodes, and characters that a reader could not
// see (terminal escapes, control, bidirectional, zero-width and tag characters) are shown by name.
import type { ComponentChild } from "preact";
import { useState } from "preact/hooks";
import { number } from "../format";

const ESCAPES =
  "\\u001b\\[[0-?]*[ -/]*[@-~]" + // terminal colours and cursor moves
  "|\\u001b\\][^\\u0007\\u001b]{0,200}(?:\\u0007|\\u001b\\\\)?"; // titles and links of terminals
const HIDDEN =
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff" +
  "\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]";
const UNSEEN = new RegExp(`(${ESCAPES}|${HIDDEN})`, "gu");

const CONTROLS = (
  "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
).split(" ");

const NAMES: Record<number, string> = {
  0x00ad: "soft hyphen", 0x061c: "Arabic letter mark", 0x200b: "zero-width space", 0x200e: "left-to-right mark",
  0x200f: "right-to-left mark", 0x2028: "line separator", 0x2029: "paragraph separator", 0x202a: "left-to-right embedding",
  0x202b: "right-to-left embedding", 0x202c: "pop directional formatting", 0x202d: "left-to-right override",
  0x202e: "right-to-left override", 0x2060: "word joiner", 0x2066: "left-to-right isolate", 0x2067: "right-to-left isolate",
  0x2068: "first strong isolate", 0x2069: "pop directional isolate", 0xfeff: "byte order mark",
};

/** What is shown for an invisible character or escape sequence. */
export function visible(hidden: string): string {
  return [...hidden].map((char) => {
    const code = char.codePointAt(0) ?? 0;
    if (code < 0x20) return CONTROLS[code] ?? "";
    if (code === 0x7f) return "DEL";
    if (code >= 0xe0020 && code <= 0xe007e) return `[tag ${String.fromCodePoint(code - 0xe0000)}]`;
    if (new RegExp(`^${HIDDEN}$`, "u").test(char)) return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
    return char;
  }).join("");
}

function explain(hidden: string): string {
  const code = hidden.codePointAt(0) ?? 0;
  if (hidden.length > 1 && code === 0x1b) return "terminal escape sequence, not applied";
  return NAMES[code] ?? (code < 0xa0 ? "control character" : "invisible character");
}

/** Text with its invisible characters made visible, without any limit of length. */
export function shown(text: string): ComponentChild[] {
  return text.split(UNSEEN).map((part, at) =>
    at % 2 === 0 ? part : <span key={at} class="unseen" title={explain(part)}>{visible(part)}</span>);
}

const TAIL = 12; // characters at the end of a name that are never cut

/** A name in a column that may be too narrow for it. It is cut before its end, because names that begin alike differ there. */
export function Name({ text }: { text: string }) {
  const characters = [...text];
  if (characters.length <= TAIL) return <SafeText text={text} inline />;
  return (
    <span class="name">
      <SafeText text={characters.slice(0, -TAIL).join("")} inline />
      <SafeText text={characters.slice(-TAIL).join("")} inline />
    </span>
  );
}

const FIRST = 20_000; // characters shown of a long text
const MORE = 200_000;

/** Foreign text on one line (`inline`) or as a block with its line breaks; long blocks are shown piece by piece. */
export function SafeText({ text, inline = false, first = FIRST }: { text: string; inline?: boolean; first?: number }) {
  const [limit, setLimit] = useState(first);
  if (inline) return <bdi class="foreign">{shown(text.length > 2000 ? `${text.slice(0, 2000)}…` : text)}</bdi>;
  // Do not cut between the two halves of one character.
  const cut = text.length > limit && /[\ud800-\udbff]/.test(text[limit - 1] ?? "") ? limit + 1 : limit;
  return (
    <div class="foreign block" dir="auto">
      {shown(text.length > cut ? text.slice(0, cut) : text)}
      {text.length > cut && (
        <button class="more" onClick={() => setLimit(limit + MORE)}>
          Show more ({number(text.length - cut)} characters left)
        </button>
      )}
    </div>
  );
}
