// Tables: a plain one, and one that draws only the rows in sight. Rows with a link can be walked with j and k.
import type { ComponentChild, ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Column<Row> {
  key: string;
  head: ComponentChild;
  cell: (row: Row, index: number) => ComponentChild;
  is_number?: boolean; // right-aligned, tabular figures
  width?: string; // a CSS grid track in virtual tables, e.g. "8rem" or "minmax(6rem, 1fr)"
  title?: string; // explains the column
  sort?: string; // what `onSort` gets when the head is pressed
}

interface TableProps<Row> {
  label: string; // for screen readers
  layout?: string; // a class of app.css with column widths, so that tables under each other line up
  columns: Column<Row>[];
  rows: Row[];
  rowKey: (row: Row, index: number) => string;
  rowClass?: (row: Row) => string;
  sorted?: string; // "reward" ascending, "-reward" descending
  onSort?: (sort: string) => void;
}

export function Table<Row>({ label, layout = "", columns, rows, rowKey, rowClass, sorted, onSort }: TableProps<Row>) {
  return (
    <Scroll label={label}>
      <table class={layout}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.key} scope="col" class={column.is_number ? "number" : ""} title={column.title}
                  aria-sort={order(column, sorted)}>
                <Head column={column} sorted={sorted} onSort={onSort} />
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, index) => (
            <tr key={rowKey(row, index)} class={rowClass?.(row) ?? ""} data-row>
              {columns.map((column) => (
                <td key={column.key} class={column.is_number ? "number" : ""}>{column.cell(row, index)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

/** A box that scrolls sideways when its content is wide, and can then be focused and scrolled with the arrow keys. */
export function Scroll({ label, children }: { label: string; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [isWide, setWide] = useState(false);
  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const measure = () => setWide(element.scrollWidth > element.clientWidth + 1);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    if (element.firstElementChild) observer.observe(element.firstElementChild);
    return () => observer.disconnect();
  }, []);
  return (
    <div class="scroll" ref={box} {...(isWide ? { tabIndex: 0, role: "region", "aria-label": label } : {})}>{children}</div>
  );
}

interface VirtualProps<Row> extends TableProps<Row> {
  rowHeight?: number; // pixels; all rows are equally high
  total?: number; // rows that there are, if `rows` are only the first ones
  onEnd?: () => void; // the last row came in sight
}

/** A table of many rows in a box of its own, of which only those in sight are in the document. */
export function VirtualTable<Row>({
  label, columns, rows, rowKey, rowClass, sorted, onSort, rowHeight = 34, total, onEnd,
}: VirtualProps<Row>) {
  const box = useRef<HTMLDivElement>(null);
  const [sight, setSight] = useState<[number, number]>([0, 40]);
  const widths = columns.map((column) => column.width ?? "minmax(5rem, 1fr)");
  const tracks = widths.join(" ");
  // Every row is a grid of its own: they agree on their tracks only if none is stretched by what is in it.
  const minWidth = `${widths.reduce((sum, width) => sum + Number(/([\d.]+)rem/.exec(width)?.[1] ?? 5), 0)}rem`;

  const look = () => {
    const element = box.current;
    if (element === null) return;
    const first = Math.max(0, Math.floor(element.scrollTop / rowHeight) - 12);
    const last = Math.ceil((element.scrollTop + element.clientHeight) / rowHeight) + 12;
    setSight((old) => (old[0] === first && old[1] === last ? old : [first, last]));
  };
  useEffect(() => {
    look();
    const observer = new ResizeObserver(look);
    if (box.current) observer.observe(box.current);
    return () => observer.disconnect();
  }, [rowHeight]);
  useEffect(() => {
    if (rows.length > 0 && sight[1] >= rows.length) onEnd?.();
  }, [sight[1], rows.length]);

  const inSight = rows.slice(sight[0], sight[1]);
  return (
    <div class="virtual" ref={box} onScroll={look} role="table" aria-label={label} aria-rowcount={(total ?? rows.length) + 1}
         tabIndex={0}>
      <div class="virtual-head" role="row" aria-rowindex={1} style={{ gridTemplateColumns: tracks, minWidth }}>
        {columns.map((column) => (
          <div key={column.key} role="columnheader" class={column.is_number ? "number" : ""} title={column.title}
               aria-sort={order(column, sorted)}>
            <Head column={column} sorted={sorted} onSort={onSort} />
          </div>
        ))}
      </div>
      <div class="virtual-body" role="rowgroup" style={{ height: `${rows.length * rowHeight}px`, minWidth }}>
        {inSight.map((row, offset) => {
          const index = sight[0] + offset;
          return (
            <div key={rowKey(row, index)} class={`virtual-row ${rowClass?.(row) ?? ""}`} role="row" aria-rowindex={index + 2}
                 data-row style={{ gridTemplateColumns: tracks, height: `${rowHeight}px`, top: `${index * rowHeight}px` }}>
              {columns.map((column) => (
                <div key={column.key} role="cell" class={column.is_number ? "number" : ""}>{column.cell(row, index)}</div>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function Head<Row>({ column, sorted, onSort }: { column: Column<Row>; sorted?: string; onSort?: (sort: string) => void }) {
  if (column.sort === undefined || onSort === undefined) return <>{column.head}</>;
  const key = column.sort;
  const mark = sorted === key ? "▲" : sorted === `-${key}` ? "▼" : "";
  return (
    <button class="sort" onClick={() => onSort(sorted === `-${key}` ? key : `-${key}`)}>
      {column.head}<span aria-hidden="true" class="sort-mark">{mark}</span>
    </button>
  );
}

function order<Row>(column: Column<Row>, sorted?: string): "ascending" | "descending" | undefined {
  if (column.sort === undefined || sorted === undefined) return undefined;
  return sorted === column.sort ? "ascending" : sorted === `-${column.sort}` ? "descending" : undefined;
}
