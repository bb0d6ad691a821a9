// Who talks to whom: rates between groups of publishers, prefixes of keys and groups of receivers, smoothed.

import type { Talk } from "./types";

const KEPT = 0.6;
const QUIET = 0.02;
/** Nodes of one column; the others are one node. */
export const MOST_NODES = 14;
export const NOBODY = "nobody";
export const OTHERS = "others";

export interface Node {
  id: string;
  label: string;
  detail: string;
  rate: number;
}

export interface Link {
  from: string;
  to: string;
  rate: number;
}

export interface Picture {
  columns: [Node[], Node[], Node[]];
  /** From publishers to prefixes: messages a second; from prefixes to receivers: copies a second. */
  links: [Link[], Link[]];
}

const SEPARATOR = "\u0000";

export class Flows {
  private readonly published = new Map<string, number>();
  private readonly delivered = new Map<string, number>();
  private readonly groups = new Map<string, { label: string; user: string; numbers: Set<number> }>();
  /** The part of the messages that the bus has looked at. */
  part = 1;
  /** The sum of the weights of all events: less than 1 in the first seconds. */
  private weight = 0;
  others = 0;

  clear(): void {
    this.published.clear();
    this.delivered.clear();
    this.groups.clear();
    this.weight = 0;
  }

  add(talk: Talk): void {
    if (talk.seconds < 0.2) return; // the first event of a stream
    const seen = talk.flows.reduce((sum, flow) => sum + flow.messages, talk.others);
    // The bus looks at a sample when there is too much; what it has seen stands for the rest.
    this.part = seen === 0 ? 1 : seen / (seen + talk.missed);
    const seconds = talk.seconds * this.part;
    this.weight = this.weight * KEPT + 1 - KEPT;
    const group = new Map<number, string>();
    for (const client of talk.clients) {
      const label = client.program || (client.client === 0 ? "the server" : `PID ${client.pid}`);
      const id = `${label} ${client.user}`;
      group.set(client.client, id);
      const known = this.groups.get(id) ?? { label, user: client.user, numbers: new Set<number>() };
      known.numbers.add(client.client);
      this.groups.set(id, known);
    }
    for (const rates of [this.published, this.delivered]) for (const [link, rate] of rates) rates.set(link, rate * KEPT);
    for (const flow of talk.flows) {
      const rate = ((1 - KEPT) * flow.messages) / seconds;
      const publisher = group.get(flow.publisher) ?? OTHERS;
      increase(this.published, publisher + SEPARATOR + flow.prefix, rate);
      for (const number of flow.receivers) {
        increase(this.delivered, flow.prefix + SEPARATOR + (group.get(number) ?? OTHERS), rate);
      }
      const unnamed = flow.receivers_total - flow.receivers.length;
      if (unnamed > 0) increase(this.delivered, flow.prefix + SEPARATOR + OTHERS, rate * unnamed);
      if (flow.receivers_total === 0) increase(this.delivered, flow.prefix + SEPARATOR + NOBODY, rate);
    }
    for (const rates of [this.published, this.delivered]) {
      for (const [link, rate] of rates) if (rate < QUIET) rates.delete(link);
    }
    this.others = talk.others / seconds;
  }

  picture(): Picture {
    const left = split(this.published, this.weight);
    const right = split(this.delivered, this.weight);
    const publishers = largest(sums(left, "from"));
    const prefixes = largest(sums(left, "to"));
    const receivers = largest(sums(right, "to"));
    const first = merge(left, publishers, prefixes);
    const second = merge(right, prefixes, receivers);
    const middle = column(sums(first, "to"), (id) => ({ label: id === OTHERS ? "other prefixes" : id || "(empty key)", detail: "" }));
    middle.sort((a, b) => compare(a.id, b.id));
    const places = new Map(middle.map((node, at) => [node.id, at]));
    const describe = (id: string): { label: string; detail: string } => {
      if (id === NOBODY) return { label: "nobody", detail: "no subscriber" };
      const found = this.groups.get(id);
      if (found === undefined) return { label: "others", detail: "" };
      return { label: found.label, detail: found.numbers.size > 1 ? `${found.user} · ${found.numbers.size} clients` : found.user };
    };
    const starts = column(sums(first, "from"), describe);
    const ends = column(sums(second, "to"), describe);
    order(starts, first, "from", "to", places);
    order(ends, second, "to", "from", places);
    return { columns: [starts, middle, ends], links: [first, second] };
  }
}

const compare = (a: string, b: string): number => Number(a === OTHERS) - Number(b === OTHERS) || (a < b ? -1 : Number(a > b));

function increase(rates: Map<string, number>, key: string, by: number): void {
  rates.set(key, (rates.get(key) ?? 0) + by);
}

function split(rates: Map<string, number>, weight = 1): Link[] {
  return [...rates].map(([link, rate]) => {
    const at = link.indexOf(SEPARATOR);
    return { from: link.slice(0, at), to: link.slice(at + 1), rate: rate / weight };
  });
}

function sums(links: Link[], end: "from" | "to"): Map<string, number> {
  const found = new Map<string, number>();
  for (const link of links) increase(found, link[end], link.rate);
  return found;
}

function largest(rates: Map<string, number>): Set<string> {
  return new Set([...rates].sort((a, b) => b[1] - a[1] || compare(a[0], b[0])).slice(0, MOST_NODES).map(([id]) => id));
}

function merge(links: Link[], froms: Set<string>, tos: Set<string>): Link[] {
  const found = new Map<string, number>();
  for (const { from, to, rate } of links) {
    increase(found, (froms.has(from) ? from : OTHERS) + SEPARATOR + (tos.has(to) ? to : OTHERS), rate);
  }
  return split(found);
}

function column(rates: Map<string, number>, describe: (id: string) => { label: string; detail: string }): Node[] {
  return [...rates].map(([id, rate]) => ({ id, rate, ...describe(id) }));
}

/** Put nodes where the prefixes are that they talk to, so that few links cross. */
function order(nodes: Node[], links: Link[], own: "from" | "to", other: "from" | "to", places: Map<string, number>): void {
  const weights = new Map<string, [number, number]>();
  for (const link of links) {
    const sum = weights.get(link[own]) ?? [0, 0];
    sum[0] += link.rate * (places.get(link[other]) ?? 0);
    sum[1] += link.rate;
    weights.set(link[own], sum);
  }
  const centre = (node: Node): number => {
    const [sum, weight] = weights.get(node.id) ?? [0, 1];
    return Math.round((2 * sum) / (weight || 1)) / 2;
  };
  nodes.sort((a, b) => centre(a) - centre(b) || compare(a.id, b.id));
}
