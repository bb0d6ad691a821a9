// Five minutes of rates: uPlot draws them, a table has the same figures.

import uPlot from "uplot";
import { byId, fillTable, h, setText } from "./dom";
import { rate, time } from "./format";

const SECONDS = 300;
const SERIES = [
  { name: "Published", color: "--c-published", width: 1.75 },
  { name: "Delivered", color: "--c-delivered", width: 1.75 },
  { name: "Dropped", color: "--c-dropped", width: 2, dash: [5, 3] },
  { name: "Replaced", color: "--c-conflated", width: 1.5, dash: [2, 3] },
  { name: "Nobody subscribed", color: "--c-unrouted", width: 1.5, dash: [8, 3] },
] as const;
const TABLE_STEP = 10;

export class Rates {
  private readonly columns: (number | null)[][] = [[], [], [], [], [], []];
  private readonly shown = SERIES.map(() => true);
  private readonly values: HTMLElement[] = [];
  private plot: uPlot | null = null;
  private readonly target = byId("rates-plot");

  constructor() {
    SERIES.forEach((series, at) => {
      const value = h("span", { class: "value" }, "–");
      this.values.push(value);
      const button = h(
        "button",
        { type: "button", class: `key key-${at}`, "aria-pressed": "true" },
        h("i", { "aria-hidden": "true" }),
        series.name,
        value,
      );
      button.addEventListener("click", () => {
        this.shown[at] = !this.shown[at];
        button.setAttribute("aria-pressed", String(this.shown[at]));
        this.plot?.setSeries(at + 1, { show: this.shown[at]! });
      });
      byId("rates-legend").append(h("li", {}, button));
    });
    new ResizeObserver(() => this.resize()).observe(this.target);
    byId<HTMLDetailsElement>("rates-table").closest("details")?.addEventListener("toggle", () => this.table());
  }

  reset(): void {
    for (const column of this.columns) column.length = 0;
  }

  /** Add the rates at a time; `null` leaves a gap. */
  add(at: number, rates: (number | null)[]): void {
    this.columns[0]!.push(at);
    for (let i = 0; i < SERIES.length; i += 1) this.columns[i + 1]!.push(rates[i] ?? null);
    while ((this.columns[0]![0] ?? at) < at - SECONDS) for (const column of this.columns) column.shift();
  }

  draw(): void {
    const length = this.columns[0]!.length;
    byId("rates-empty").hidden = length > 0;
    if (length === 0) return;
    if (this.plot === null) this.create();
    this.plot?.setData(this.columns as uPlot.AlignedData);
    const last = this.columns.map((column) => column.at(-1) ?? 0);
    this.values.forEach((value, at) => setText(value, `${rate(last[at + 1]!)}/s`));
    setText(
      byId("rates-summary"),
      SERIES.map((series, at) => {
        const most = Math.max(0, ...this.columns[at + 1]!.map((value) => value ?? 0));
        return `${series.name}: ${rate(last[at + 1]!)} a second now, ${rate(most)} at most.`;
      }).join(" "),
    );
    this.table();
  }

  /** Draw with the colours of another theme. */
  recolor(): void {
    this.plot?.destroy();
    this.plot = null;
    this.draw();
  }

  private table(): void {
    const table = byId<HTMLTableElement>("rates-table");
    if (!table.closest("details")?.open) return;
    const rows: string[][] = [];
    for (let at = this.columns[0]!.length - 1; at >= 0; at -= TABLE_STEP) {
      rows.push([time(this.columns[0]![at]!), ...SERIES.map((_, i) => rate(this.columns[i + 1]![at] ?? 0))]);
    }
    const heads = [{ text: "Time" }, ...SERIES.map((series) => ({ text: `${series.name} /s`, isNumber: true }))];
    fillTable(table, heads, rows);
  }

  private size(): { width: number; height: number } {
    return { width: Math.max(240, this.target.clientWidth), height: 248 };
  }

  private resize(): void {
    this.plot?.setSize(this.size());
  }

  private create(): void {
    if (this.target.clientWidth === 0) return;
    const style = getComputedStyle(this.target);
    const color = (name: string): string => resolve(this.target, style.getPropertyValue(name));
    const axis = { stroke: color("--soft"), font: `12px ${style.fontFamily}`, grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 26, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 7 }, drag: { setScale: false } },
        scales: { x: { time: true, range: (_, min, max) => [Math.max(max - SECONDS, Math.min(min, max - 60)), max] }, y: { range: (_, __, max) => [0, Math.max(1, max * 1.12)] } },
        axes: [
          { ...axis, size: 30, space: 90, values: (_, ticks) => ticks.map((tick) => time(tick)) },
          { ...axis, size: 56, space: 42, values: (_, ticks) => ticks.map((tick) => rate(tick)) },
        ],
        series: [
          {},
          ...SERIES.map((series, at) => ({
            label: series.name,
            show: this.shown[at]!,
            stroke: color(series.color),
            width: series.width,
            ...("dash" in series ? { dash: [...series.dash] } : {}),
            ...(at === 0 ? { fill: color("--c-published-fill") } : {}),
            points: { show: false },
          })),
        ],
        hooks: {
          setCursor: [
            (plot) => {
              const at = plot.cursor.idx;
              this.values.forEach((value, i) => {
                const column = this.columns[i + 1]!;
                const shown = at === null || at === undefined ? column.at(-1) : column[at];
                setText(value, `${rate(shown ?? 0)}/s`);
              });
            },
          ],
        },
      },
      this.columns as uPlot.AlignedData,
      this.target,
    );
  }
}

/** A colour as a canvas takes it: `light-dark()` and variables resolved. */
function resolve(place: HTMLElement, value: string): string {
  const probe = h("i");
  probe.style.color = value;
  place.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
