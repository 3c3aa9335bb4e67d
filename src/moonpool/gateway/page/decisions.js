// The newest requests, what became of them, and what each instance would have cost.

import { ago, byId, count, element, NONE, put, seconds } from "./say.js";
import { Table } from "./tables.js";

const PARTS = ["queue", "fetch", "compute"];

export class Decisions {
  /** `explain` is told the request that somebody wants explained. */
  constructor(explain) {
    const columns = [
      { name: "Request", left: true, fill: (cell, d) => ask(cell, d, explain) },
      { name: "Arrived", minor: true, text: (d) => ago(d.seconds_ago) },
      { name: "Now", left: true, text: (d) => d.outcome },
      { name: "Prompt", minor: true, text: (d) => (d.weighing ? `${count(d.weighing.tokens)} tokens` : NONE) },
      { name: "Placed on", left: true, text: placed },
      { name: "First token", text: (d) => first(d) },
      { name: "Weighed for prefill", left: true, fill: (cell, d) => weighed(cell, d, prefill(d), d.prefill_instances) },
      { name: "Weighed for decode", left: true, minor: true, fill: (cell, d) => weighed(cell, d, decode(d), d.decode_instances) },
    ];
    this.table = new Table(byId("decided"), columns, "No request has come since the Conductor began.");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("ask-id").value.trim();
      if (id) explain(id);
    });
  }

  show(decided) {
    this.table.show(decided, (d) => d.request, {});
  }
}

function ask(cell, d, explain) {
  const name = d.label || d.request;
  if (!cell.firstElementChild) {
    const button = element("button", { type: "button", class: "link" });
    button.addEventListener("click", () => explain(cell.dataset.request));
    cell.append(button);
  }
  cell.dataset.request = d.request;
  put(cell.firstElementChild, name);
  cell.firstElementChild.title = `Explain ${name}`;
}

const placed = (d) => {
  const w = d.weighing;
  return w && w.verdict === "placed" ? `${w.chosen_prefill} → ${w.chosen_decode}` : d.why || NONE;
};

function first(d) {
  const w = d.weighing;
  if (!w) return NONE;
  const predicted = seconds(w.waited_seconds + w.ttft_seconds);
  return w.slo_ttft == null ? predicted : `${predicted} of ${seconds(w.slo_ttft)}`;
}

/** Candidates as {id, is_chosen, total, parts, title}. */
function prefill(d) {
  const w = d.weighing;
  if (!w) return [];
  return w.prefill.map((c) => {
    const parts = [c.queue_seconds, c.fetch_seconds, c.compute_seconds];
    const fetch = c.fetch_blocks ? `, ${c.fetch_blocks} of them fetched from ${c.fetch_from}` : "";
    const said = PARTS.map((name, at) => `${name} ${seconds(parts[at])}`).join(", ");
    return { id: c.id, chosen: c.id === w.chosen_prefill, total: c.ttft_seconds, parts, title: `${c.hit_blocks} of ${w.blocks} blocks hit${fetch}; ${said}` };
  });
}

function decode(d) {
  const w = d.weighing;
  if (!w) return [];
  return w.decode.map((c) => ({ id: c.id, chosen: c.id === w.chosen_decode, total: c.tbt_seconds, parts: [], title: `has ${c.held_blocks} of ${w.blocks} blocks` }));
}

/** Made anew only where something else was weighed. */
function weighed(cell, d, candidates, instances) {
  const mark = `${d.request} ${d.weighing?.at}`;
  if (cell.dataset.mark === mark) return;
  cell.dataset.mark = mark;
  const longest = Math.max(...candidates.map((c) => c.total), 1e-9);
  const lines = candidates.map((c) => {
    const scale = element("span", { class: "scale", "aria-hidden": "true" });
    c.parts.forEach((part, at) => {
      const seg = element("span", { class: `seg ${PARTS[at]}` });
      seg.style.width = `${Math.round((100 * part) / longest)}%`;
      scale.append(seg);
    });
    const name = element("span", { class: "who" }, c.id);
    const mine = c.chosen ? element("span", { class: "unseen" }, " (chosen)") : "";
    return element("li", { class: c.chosen ? "chosen" : null, title: c.title }, name, mine, ...(c.parts.length ? [scale] : []), element("span", { class: "cost" }, seconds(c.total)));
  });
  if (instances > candidates.length) lines.push(element("li", { class: "soft" }, `and ${instances - candidates.length} more`));
  cell.replaceChildren(lines.length ? element("ul", { class: "weighed" }, ...lines) : NONE);
}
