// "Queues": the jobs of each queue by state, as its service says.

import { byId, fillTable } from "./dom";
import { count } from "./format";
import type { Queue } from "./types";

const HEADS = ["Ready", "Waiting", "Delayed", "Out", "Dead", "Workers"].map((text) => ({ text, isNumber: true }));

/** Show the queues. The panel appears with the first one: most buses have none. */
export function showQueues(queues: Queue[]): void {
  byId("queues").hidden = queues.length === 0;
  fillTable(
    byId<HTMLTableElement>("queues-table"),
    [{ text: "Queue" }, ...HEADS, { text: "Problem" }],
    queues.map(({ queue, jobs, workers, problem }) => [
      queue,
      ...[jobs.ready, jobs.waiting, jobs.delayed, jobs.out, jobs.dead, workers].map(count),
      problem || "–",
    ]),
  );
}
