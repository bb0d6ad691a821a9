// "Not allowed": what users had no permission for, by rule of the policy.

import { byId, fillTable } from "./dom";
import { count, duration } from "./format";
import type { Status } from "./types";

export class DeniedTable {
  /** Show the rows of a status. The panel appears with the first one: most buses have no policy. */
  show(status: Status): void {
    const rows = status.denied ?? [];
    byId("denied").hidden = rows.length === 0;
    fillTable(
      byId<HTMLTableElement>("denied-table"),
      [{ text: "User" }, { text: "Rule" }, { text: "Refused", isNumber: true }, { text: "Last", isNumber: true }],
      rows.map((row) => [
        row.user,
        row.rule,
        count(row.count),
        status.time - row.at < 2 ? "now" : `${duration(status.time - row.at)} ago`,
      ]),
    );
  }
}
