// The table of clients.

import { byId, h, setText } from "./dom";
import { bytes, count, duration } from "./format";
import type { Client, Clients } from "./types";

export type Sort = "queue" | "lost" | "memory" | "patterns" | "number";

interface Column {
  text: string;
  sort?: Sort;
  isNumber?: boolean;
  value: (client: Client) => string;
}

const COLUMNS: Column[] = [
  { text: "Client", sort: "number", value: (c) => `#${c.client}` },
  { text: "Program", value: (c) => c.program || "?" },
  { text: "PID", isNumber: true, value: (c) => String(c.pid) },
  { text: "User", value: (c) => c.user },
  { text: "Listener", value: (c) => c.listener },
  { text: "Queue", sort: "queue", isNumber: true, value: (c) => (c.queue_bytes ? `${count(c.queue_messages)} · ${bytes(c.queue_bytes)}` : "–") },
  { text: "Strategy", value: strategy },
  { text: "Lost", sort: "lost", isNumber: true, value: (c) => (c.lost_messages ? count(c.lost_messages) : "–") },
  { text: "Replaced", isNumber: true, value: (c) => (c.conflated_messages ? count(c.conflated_messages) : "–") },
  { text: "State", value: () => "" },
  { text: "Patterns", sort: "patterns", isNumber: true, value: (c) => count(c.patterns) },
  { text: "Memory", sort: "memory", isNumber: true, value: (c) => bytes(c.memory_bytes) },
  { text: "Connected", isNumber: true, value: (c) => duration(Date.now() / 1000 - c.connected_at) },
];
const STATE = COLUMNS.findIndex((column) => column.text === "State");
const QUEUE = COLUMNS.findIndex((column) => column.text === "Queue");

function strategy(client: Client): string {
  const { soft_strategy: soft = "", hard_strategy: hard = "", order = "" } = client;
  const parts = [soft];
  if (soft === "queue" && hard !== "") parts.push(hard);
  return parts.join(", then ") + (order !== "" && order !== "queue" ? `; ${order}` : "");
}

function state(client: Client): { text: string; tone: string } {
  const by = client.blocked_by ?? [];
  if (by.length > 0) return { text: `held by ${by.slice(0, 3).map((n) => `#${n}`).join(", ")}${by.length > 3 ? "…" : ""}`, tone: "warn" };
  if (client.is_paused) return { text: "held", tone: "warn" };
  if (client.is_congested) return { text: "lagging", tone: "warn" };
  if (client.is_observer) return { text: "observer", tone: "" };
  return { text: "keeps up", tone: "" };
}

export class ClientsTable {
  sort: Sort = "queue";
  limit = 100;
  private data: Clients = { clients: [], total: 0 };
  private readonly rows: HTMLTableRowElement[] = [];
  private readonly body = h("tbody");
  private readonly heads = new Map<Sort, HTMLTableCellElement>();

  constructor(private readonly onChange: () => void) {
    const head = h("tr");
    for (const column of COLUMNS) {
      const cell = h("th", { scope: "col", class: column.isNumber ? "number" : null });
      const { sort } = column;
      if (sort === undefined) cell.append(column.text);
      else {
        cell.append(h("button", { type: "button", class: "sort", click: () => this.sortBy(sort) }, column.text));
        this.heads.set(sort, cell);
      }
      head.append(cell);
    }
    byId("clients-table").append(h("caption", { class: "unseen" }, "Clients of the bus"), h("thead", {}, head), this.body);
    byId("clients-find").addEventListener("input", () => this.draw());
    const limit = byId<HTMLSelectElement>("clients-limit");
    limit.addEventListener("change", () => {
      this.limit = Number(limit.value);
      this.onChange();
    });
    this.mark();
  }

  add(clients: Clients): void {
    this.data = clients;
    this.draw();
  }

  private sortBy(sort: Sort): void {
    this.sort = sort;
    this.mark();
    this.onChange();
  }

  private mark(): void {
    for (const [sort, cell] of this.heads) {
      if (sort === this.sort) cell.setAttribute("aria-sort", "descending");
      else cell.removeAttribute("aria-sort");
    }
  }

  draw(): void {
    const words = byId<HTMLInputElement>("clients-find").value.toLowerCase().trim();
    const clients = this.data.clients.filter(
      (c) => words === "" || `${c.program} ${c.user} ${c.pid} ${c.listener} #${c.client}`.toLowerCase().includes(words),
    );
    const most = Math.max(1, ...clients.map((client) => client.queue_bytes));
    byId("clients-empty").hidden = clients.length > 0;
    setText(
      byId("clients-hint"),
      `${count(clients.length)} of ${count(this.data.total)}, those with the largest ${this.sort === "lost" ? "losses" : this.sort} first. A program's name is what it calls itself.`,
    );
    while (this.rows.length > clients.length) this.rows.pop()!.remove();
    clients.forEach((client, at) => {
      const row = this.rows[at] ?? this.newRow();
      COLUMNS.forEach((column, i) => {
        if (i !== STATE) setText(row.cells[i]!.firstElementChild ?? row.cells[i]!, column.value(client));
      });
      const { text, tone } = state(client);
      const badge = row.cells[STATE]!.firstElementChild as HTMLElement;
      setText(badge, text);
      badge.dataset.tone = tone;
      row.cells[QUEUE]!.style.setProperty("--part", `${client.queue_bytes ? Math.max(2, (100 * client.queue_bytes) / most) : 0}%`);
      row.cells[7]!.classList.toggle("bad", client.lost_messages > 0);
    });
  }

  private newRow(): HTMLTableRowElement {
    const row = h("tr");
    COLUMNS.forEach((column, at) => {
      const cell = h(at === 0 ? "th" : "td", { class: column.isNumber ? "number" : null, scope: at === 0 ? "row" : null });
      if (at === STATE) cell.append(h("span", { class: "badge" }));
      if (at === QUEUE) {
        cell.classList.add("bar");
        cell.append(h("span"));
      }
      row.append(cell);
    });
    this.body.append(row);
    this.rows.push(row);
    return row;
  }
}
