// What the server sends. sbus/web/stream.py, overview.py and taps.py make it; the admin socket's part is documented in
// docs/operations.rst.

import type { Encoding } from "./format";

export interface Hello {
  version: string;
  bus: string;
  admin: string | null;
  user: string;
}

export interface AdminState {
  status: number;
  detail: string;
}

/** time, published, routed, dropped, conflated, unrouted, queue_bytes; totals since the start of the bus */
export type Sample = [number, number, number, number, number, number, number];

export interface Status {
  time: number;
  version: string;
  pid: number;
  started_at: number;
  clients: number;
  clients_limit: number;
  users: number;
  queues?: number;
  queue_messages?: number;
  queue_bytes: number;
  queue_largest_bytes?: number;
  queue_limit_bytes: number;
  memory_bytes: number;
  memory_limit_bytes: number;
  held_publishers?: number;
  counters: Record<string, number | Record<string, number>>;
  denied?: { uid: number; user: string; rule: string; count: number; at: number }[];
}

export interface Client {
  client: number;
  pid: number;
  uid: number;
  listener: string;
  connected_at: number;
  patterns: number;
  queue_messages: number;
  queue_bytes: number;
  memory_bytes: number;
  lost_messages: number;
  conflated_messages: number;
  is_congested: boolean;
  is_paused: boolean;
  soft_strategy?: string;
  hard_strategy?: string;
  order?: string;
  is_observer?: boolean;
  blocked_by?: number[];
  program: string;
  user: string;
}

export interface Clients {
  clients: Client[];
  total: number;
}

export interface Talk {
  seconds: number;
  missed: number;
  others: number;
  flows: {
    publisher: number;
    prefix: string;
    messages: number;
    bytes: number;
    receivers: number[];
    receivers_total: number;
  }[];
  clients: { client: number; pid: number; uid: number; listener: string; program: string; user: string }[];
}

export interface Unrouted {
  seconds: number;
  missed: number;
  others: number;
  keys: { key: string; messages: number; bytes: number }[];
}

/** ms, key, its encoding, payload, its encoding, bytes of the payload, whether it is a last value */
export type TailLine = [number, string, Encoding, string, Encoding, number, boolean];

export interface Tail {
  messages: TailLine[];
  skipped: number;
}

/** key, its encoding, messages, payload, its encoding, bytes of the payload */
export type KeyChange = [string, Encoding, number, string, Encoding, number];

export interface Keys {
  keys: KeyChange[];
  removed: [string, Encoding][];
  limit: number;
  more: number;
}

export interface Queue {
  queue: string;
  jobs: Record<"ready" | "waiting" | "delayed" | "out" | "dead", number>;
  workers: number;
  problem: string;
}

export interface Events {
  hello: Hello;
  admin: AdminState;
  history: Sample[];
  status: Status;
  clients: Clients;
  talk: Talk;
  unrouted: Unrouted;
  queues: Queue[];
  bus: { state: string; problem: string };
  tail: Tail;
  keys: Keys;
  missed: { messages: number };
}
