// Tables that are filled again and again: rows and cells stay the same elements, so focus and reading go on.

import { element, put } from "./say.js";

/**
 * A table of `columns`: {name, text(row, context), share?(row, context), fill?(cell, row, context), minor?, left?}.
 * `share` draws a bar, 1 being full, or with `drains` what is left of it; `fill` makes a cell's content itself; `minor` is left out on a phone.
 */
export class Table {
  constructor(table, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    this.body = element("tbody");
    this.empty = element("tr", {}, element("td", { colspan: String(columns.length), class: "empty" }, empty));
    const heads = columns.map((c) => element("th", { scope: "col", class: classOf(c) }, c.name));
    table.append(element("thead", {}, element("tr", {}, ...heads)), this.body);
  }

  /** `items` in order; `key` names one over time. */
  show(items, key, context) {
    const kept = new Map();
    for (const item of items) {
      const id = key(item);
      kept.set(id, this.rows.get(id) ?? this.make());
      this.columns.forEach((column, at) => fill(column, kept.get(id).cells[at], item, context));
    }
    const wanted = kept.size ? [...kept.values()] : [this.empty];
    for (const row of [...this.body.children]) if (!wanted.includes(row)) row.remove();
    wanted.forEach((row, at) => {
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
    });
    this.rows = kept;
  }

  make() {
    return element("tr", {}, ...this.columns.map((column, at) => {
      const cell = at ? element("td", { class: classOf(column) }) : element("th", { scope: "row", class: classOf(column) });
      if (!column.fill) cell.append(element("span", { class: "figure" }));
      if (column.share) cell.append(element("span", { class: "bar", "aria-hidden": "true" }, element("span")));
      return cell;
    }));
  }
}

const classOf = (column) => [column.left ? "left" : "", column.minor ? "minor" : ""].join(" ").trim() || null;

function fill(column, cell, item, context) {
  if (column.fill) {
    column.fill(cell, item, context);
    return;
  }
  put(cell.firstElementChild, column.text(item, context));
  if (column.share) bar(cell.lastElementChild, column.share(item, context), column.drains);
}

/** How full, or with `drains` how much is left; beyond 1 is over. Nothing is drawn for null. */
export function bar(node, share, drains = false) {
  const level = share == null ? "none" : share > 1 ? "over" : share > 0.8 ? "high" : "fine";
  const full = Math.min(Math.max(share ?? 0, 0), 1);
  const width = `${Math.round((drains ? Math.max(1 - full, 0.03) : full) * 100)}%`;
  if (node.dataset.level !== level) node.dataset.level = level;
  if (node.firstElementChild.style.width !== width) node.firstElementChild.style.width = width;
}
