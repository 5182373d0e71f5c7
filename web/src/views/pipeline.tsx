// The pipeline as a picture. The middle row is the way of an episode; above it weights and tokens go round, below it tickets.
import { useEffect, useRef, useState } from "preact/hooks";
import { duration, short } from "../format";
import { to } from "../router";
import type { Overview, PipelineNode } from "../types";
import { shown, SafeText } from "../ui/text";

interface Box { x: number; y: number; w: number; h: number }

const WIDE = 860; // pixels; below it the nodes stand under each other
const HEIGHT = 92;

// Where a node's details are.
const VIEW: Record<string, [string, Record<string, string>]> = {
  clients: ["clients", {}], tickets: ["mix", {}], proxies: ["logs", {}], in: ["ledger", {}], collector: ["ledger", {}],
  ready: ["episodes", { state: "published" }], learner: ["time", {}], engines: ["engines", {}],
};

// What the depth of a node counts.
const UNIT: Record<string, string> = {
  clients: "episodes", tickets: "untaken", proxies: "open calls", in: "messages", collector: "waiting",
  ready: "episodes", learner: "episodes", engines: "requests",
};

export function Pipeline({ run, nodes, bottleneck }: { run: string; nodes: PipelineNode[]; bottleneck: Overview["bottleneck"] }) {
  const frame = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = frame.current;
    if (element === null) return;
    const observer = new ResizeObserver(() => setWidth(Math.floor(element.clientWidth)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const isWide = width >= WIDE;
  const boxes = isWide ? wide(width) : stacked(nodes, width);
  const height = isWide ? 3 * HEIGHT + 2 * 34 + 4 : nodes.length * (HEIGHT + 14);
  const label = nodes.find(({ id }) => id === bottleneck?.node)?.label ?? bottleneck?.node;
  return (
    <div class="pipeline" ref={frame}>
      {bottleneck !== null && (
        <p class="bottleneck"><b>Bottleneck: {label}.</b> <SafeText text={bottleneck.text} inline /></p>
      )}
      {width > 0 && (
        <svg width={width} height={height} role="group" aria-label="The pipeline from clients to engines">
          <defs>
            <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
              <path d="M0 0.8L7 4L0 7.2z" class="arrow-head" />
            </marker>
          </defs>
          <g class="edges" aria-hidden="true">{isWide ? wideEdges(boxes) : stackedEdges(nodes, boxes)}</g>
          {nodes.map((node) => {
            const box = boxes[node.id];
            return box && <Node key={node.id} run={run} node={node} box={box} isBottleneck={node.id === bottleneck?.node} />;
          })}
        </svg>
      )}
    </div>
  );
}

function Node({ run, node, box, isBottleneck }: { run: string; node: PipelineNode; box: Box; isBottleneck: boolean }) {
  const [view, query] = VIEW[node.id] ?? ["overview", {}];
  // A learner has no queue of its own: its rate then stands where the others' depth does.
  const isDeep = node.depth !== null || node.rate_per_s === null;
  const facts = [
    node.rate_per_s === null || !isDeep ? "" : `${short(node.rate_per_s)}/s`,
    node.oldest_s === null ? "" : `oldest ${duration(node.oldest_s)}`,
  ].filter((fact) => fact !== "");
  const unit = UNIT[node.id] ?? "";
  return (
    <a href={to(run, view, "", query)} class={`node ${node.state} ${isBottleneck ? "is-bottleneck" : ""}`}>
      <g transform={`translate(${box.x} ${box.y})`}>
        <title>{node.detail}</title>
        <rect class="node-box" width={box.w} height={box.h} rx="6" />
        <circle class="node-dot" cx="15" cy="19" r="4.5" />
        <text class="node-label" x="27" y="23.5">{node.label}</text>
        <text class="node-state" x={box.w - 11} y="23.5" text-anchor="end">{node.state === "unknown" ? "" : node.state}</text>
        <text class="node-depth" x="14" y="53">
          {short(isDeep ? node.depth : node.rate_per_s)}
          <tspan class="node-unit" dx="6">{node.depth === null ? (isDeep ? "" : "/s") : unit}</tspan>
        </text>
        <text class="node-facts" x="14" y="76">{shown(facts.join("  ·  "))}</text>
      </g>
    </a>
  );
}

const CHAIN = ["clients", "proxies", "in", "collector", "ready", "learner"];

function wide(width: number): Record<string, Box> {
  const gap = 26;
  const w = (width - 4 - gap * (CHAIN.length - 1)) / CHAIN.length;
  const row = (at: number) => 2 + at * (HEIGHT + 34);
  const boxes: Record<string, Box> = {};
  CHAIN.forEach((id, at) => { boxes[id] = { x: 2 + at * (w + gap), y: row(1), w, h: HEIGHT }; });
  const middle = (from: number, to: number) => ((boxes[CHAIN[from] ?? ""]?.x ?? 0) + (boxes[CHAIN[to] ?? ""]?.x ?? 0)) / 2;
  boxes["engines"] = { x: middle(1, 5), y: row(0), w, h: HEIGHT };
  boxes["tickets"] = { x: middle(0, 3), y: row(2), w, h: HEIGHT };
  return boxes;
}

function wideEdges(boxes: Record<string, Box>) {
  const at = (id: string): Box => boxes[id] ?? { x: 0, y: 0, w: 0, h: 0 };
  const right = (id: string) => at(id).x + at(id).w;
  const center = (id: string) => at(id).x + at(id).w / 2;
  const middle = (id: string) => at(id).y + at(id).h / 2;
  const below = (id: string) => at(id).y + at(id).h;
  const edges = CHAIN.slice(1).map((id, before) => {
    const from = CHAIN[before] ?? "";
    return <path key={id} d={`M${right(from) + 3} ${middle(from)}H${at(id).x - 3}`} marker-end="url(#arrow)" />;
  });
  const turn = 10;
  return (
    <>
      {edges}
      <path d={`M${center("learner")} ${at("learner").y - 3}V${middle("engines") + turn}q0 ${-turn} ${-turn} ${-turn}H${right("engines") + 3}`}
            marker-end="url(#arrow)" />
      <text x={(right("engines") + center("learner")) / 2} y={middle("engines") - 8} text-anchor="middle">weights</text>
      <path d={`M${at("engines").x - 3} ${middle("engines")}H${center("proxies") + turn}q${-turn} 0 ${-turn} ${turn}V${at("proxies").y - 3}`}
            marker-end="url(#arrow)" marker-start="url(#arrow)" />
      <text x={(at("engines").x + center("proxies")) / 2} y={middle("engines") - 8} text-anchor="middle">prompts and tokens</text>
      <path d={`M${center("collector")} ${below("collector") + 3}V${middle("tickets") - turn}q0 ${turn} ${-turn} ${turn}H${right("tickets") + 3}`}
            marker-end="url(#arrow)" />
      <text x={(right("tickets") + center("collector")) / 2} y={middle("tickets") + 18} text-anchor="middle">permission</text>
      <path d={`M${at("tickets").x - 3} ${middle("tickets")}H${center("clients") + turn}q${-turn} 0 ${-turn} ${-turn}V${below("clients") + 3}`}
            marker-end="url(#arrow)" />
      <text x={(at("tickets").x + center("clients")) / 2} y={middle("tickets") + 18} text-anchor="middle">to begin</text>
    </>
  );
}

function stacked(nodes: PipelineNode[], width: number): Record<string, Box> {
  return Object.fromEntries(nodes.map(({ id }, at) => [id, { x: 2, y: 2 + at * (HEIGHT + 14), w: width - 4, h: HEIGHT }]));
}

function stackedEdges(nodes: PipelineNode[], boxes: Record<string, Box>) {
  return nodes.slice(1).map(({ id }) => {
    const box = boxes[id];
    return box && <path key={id} d={`M${box.x + 15} ${box.y - 13}V${box.y - 1}`} />;
  });
}
