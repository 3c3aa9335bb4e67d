// What a snapshot says in numbers: the top line, requests by phase, both pools, nodes, prefixes, refusals.

import { ago, byId, bytes, count, element, NONE, percent, put, rate, seconds } from "./say.js";
import { bar, Table } from "./tables.js";

const RATE_SECONDS = 10;
const SILENT_SECONDS = 3;
const BATCH = "batch";
const ATTAIN = 0.9;

/** What refusals are called, in words. */
const REASONS = {
  "queue-full": "too many wait already",
  displaced: "made way for a sooner class",
  "kv-room": "no room for its KVCache in time",
  "ttft-slo": "its first token would be too late",
  "tbt-slo": "tokens would come too slowly",
  context: "longer than the context",
  "never-fits": "larger than any instance",
  unservable: "nothing here can serve it",
  "no-instance": "no instance of its model is up",
  attempts: "too many attempts failed",
  deadline: "its deadline passed",
};

const STAGES = [
  ["Waiting", "for a place", (n) => n.requests.held],
  ["Reserving", "room for its KVCache", (n) => n.requests.room],
  ["Prefilling", "the prompt is computed", (n) => n.requests.prefill],
  ["Moving", "KVCache goes to decode", (n) => n.requests.moving],
  ["Streaming", "tokens are decoded", (n) => n.requests.decoding],
];

const share = (part, whole) => (whole ? part / whole : null);
const used = (p) => (p.capacity?.pages && p.pages_free != null ? p.capacity.pages - p.pages_free : null);

const NAME = { name: "Instance", text: (p) => p.id };
const HEALTH = { name: "Health", left: true, minor: true, text: (p) => health(p) };
const NODE = { name: "Node", left: true, minor: true, text: (p) => p.node || NONE };
const PAGES = {
  name: "KV pages",
  minor: true,
  text: (p) => (used(p) == null ? NONE : `${count(used(p))} of ${count(p.capacity.pages)}`),
  share: (p) => share(used(p), p.capacity?.pages),
};
const headroom = (seconds_, limit) => (seconds_ == null || limit == null ? null : 1 - seconds_ / limit);

const PREFILL = [
  NAME,
  HEALTH,
  { name: "Queue", text: (p) => count(p.queued ?? p.assigned) },
  { name: "Until computed", text: (p) => seconds(p.queue_seconds) },
  {
    name: "TTFT headroom",
    text: (p, c) => percent(headroom(p.queue_seconds, c.slo.ttft)),
    drains: true,
    share: (p, c) => (c.slo.ttft == null ? null : p.queue_seconds / c.slo.ttft),
  },
  { name: "Computes", minor: true, text: (p, c) => perSecond(c.rate(p, "computed_tokens"), "tokens") },
  { name: "From cache", minor: true, text: (p, c) => perSecond(c.rate(p, "cached_tokens"), "tokens") },
  PAGES,
  NODE,
];

const DECODE = [
  NAME,
  HEALTH,
  {
    name: "Batch",
    text: (p) => (p.capacity?.slots ? `${count(p.running)} of ${count(p.capacity.slots)}` : count(p.running)),
    share: (p) => share(p.running, p.capacity?.slots),
  },
  { name: "To join", minor: true, text: (p) => count(Math.max((p.assigned ?? 0) - (p.running ?? 0), p.queued ?? 0)) },
  { name: "Step", text: (p) => seconds(p.step_seconds) },
  {
    name: "TBT headroom",
    text: (p, c) => percent(headroom(p.step_seconds, c.slo.tbt)),
    drains: true,
    share: (p, c) => (c.slo.tbt == null ? null : p.step_seconds / c.slo.tbt),
  },
  { name: "Decodes", minor: true, text: (p, c) => perSecond(c.rate(p, "generated_tokens"), "tokens") },
  { name: "Preempted", minor: true, text: (p) => count(p.counters?.preempted) },
  PAGES,
  NODE,
];

const NODES = [
  { name: "Node", text: (p) => p.id },
  { name: "Index", left: true, text: (p) => (p.health === "up" ? p.index : p.health) || NONE },
  {
    name: "DRAM",
    text: (p) => `${bytes(p.used_bytes)} of ${bytes(p.capacity?.dram_bytes)}`,
    share: (p) => share(p.used_bytes, p.capacity?.dram_bytes),
  },
  {
    name: "SSD",
    text: (p) => (ssd(p) ? `${bytes(p.counters.ssd_used_bytes ?? 0)} of ${bytes(ssd(p))}` : NONE),
    share: (p) => share(p.counters?.ssd_used_bytes, ssd(p)),
  },
  { name: "Blocks", minor: true, text: (p) => count(Object.values(p.blocks ?? {}).reduce((a, b) => a + b, 0)) },
  { name: "Blocks found", text: (p) => percent(found(p)) },
  { name: "From SSD", minor: true, text: (p) => count(p.counters?.ssd_promotions) },
  { name: "In", text: (p, c) => perSecond(c.rate(p, "bytes_in"), "", bytes) },
  { name: "Out", text: (p, c) => perSecond(c.rate(p, "bytes_out"), "", bytes) },
  { name: "Rooms", minor: true, text: (p) => count(p.rooms) },
  { name: "Evicted", minor: true, text: (p) => count(p.counters?.evictions) },
];

const PREFIXES = [
  { name: "Prefix", text: (p) => p.key.slice(0, 12) },
  { name: "Tokens", text: (p) => count(p.tokens) },
  { name: "Uses", text: (p) => count(p.uses) },
  { name: "Last", text: (p) => ago(p.seconds_ago) },
  { name: "Copies", left: true, text: (p) => copies(p) },
];

const REFUSED = [
  { name: "Reason", text: (r) => r.reason },
  { name: "Means", left: true, minor: true, text: (r) => REASONS[r.reason] ?? "" },
  { name: "Last minute", text: (r) => count(r.lately) },
  { name: "Since start", text: (r) => count(r.ever) },
];

const CLASSES = [
  { name: "Class", text: (c) => c.name },
  { name: "Limits", left: true, text: (c) => `TTFT ${limit(c.slo.ttft)}, TBT ${limit(c.slo.tbt)}` },
  { name: "Queued", text: (c) => count(c.queued) },
  { name: "Completed", text: (c) => count(c.window.completed) },
  { name: "Within limits", text: (c) => percent(share(c.window.attained, c.window.completed)) },
  { name: "TTFT P90", text: (c) => seconds(c.window.ttft.p90), share: (c) => ratio(c.window.ttft.p90, c.slo.ttft) },
  { name: "TBT P90", text: (c) => seconds(c.window.tbt.p90), share: (c) => ratio(c.window.tbt.p90, c.slo.tbt) },
];

const TILES = ["Goodput", "TTFT, P90", "TBT, P90", "In flight", "Output", "Prompt tokens cached", "Refused", "Longest wait now"];

export class Figures {
  constructor() {
    this.past = [];
    this.tiles = new Map(TILES.map((name) => [name, tile(byId("tiles"), name)]));
    this.stages = STAGES.map(([name, note]) => stage(byId("stages"), name, note));
    this.endings = ["Finished", "Refused", "Cancelled"].map((name) => stage(byId("stages"), name, "since start", "end"));
    this.prefill = new Table(byId("prefill"), PREFILL, "No prefill instance is up.");
    this.decode = new Table(byId("decode"), DECODE, "No decode instance is up.");
    this.nodes = new Table(byId("nodes"), NODES, "No node is up.");
    this.prefixes = new Table(byId("prefixes"), PREFIXES, "No two of the newest prompts begin alike.");
    this.refused = new Table(byId("refused"), REFUSED, "Nothing was refused.");
    this.classes = new Table(byId("classes"), CLASSES, "");
  }

  /** Nothing new comes, and why. */
  silent(why) {
    this.status("bad", `No figures: ${why}`);
    document.body.classList.add("stale");
  }

  show(now) {
    document.body.classList.remove("stale");
    this.remember(now);
    const context = { slo: limits(now.classes), rate: (part, name) => this.rate(part, name) };
    this.status(...verdict(now));
    put(byId("setup"), [now.model, now.placement && `${now.placement} placement`, now.admission && `${now.admission} admission`].filter(Boolean).join(" · "));
    this.top(now, context);
    this.stages.forEach((say, at) => say(STAGES[at][2](now) ?? null));
    const ever = now.decisions;
    const all = Object.values(ever.rejected ?? {}).reduce((a, b) => a + b, 0);
    [ever.finished, ever.rejected && all, ever.cancelled].forEach((n, at) => this.endings[at](n ?? null));
    const id = (part) => part.id;
    this.prefill.show(now.parts.filter((p) => ["prefill", "coupled"].includes(p.kind)), id, context);
    this.decode.show(now.parts.filter((p) => ["decode", "coupled"].includes(p.kind)), id, context);
    this.nodes.show(now.parts.filter((p) => p.kind === "node"), id, context);
    this.prefixes.show(now.prefixes, (p) => p.key, context);
    this.refusals(now);
    const served = now.classes.filter((c) => c.name !== BATCH || c.queued || c.window.completed);
    byId("classes-part").hidden = served.length < 2;
    this.classes.show(served, (c) => c.name, context);
    put(byId("updated"), `Updated ${new Date(now.at * 1000).toLocaleTimeString()}.`);
  }

  top(now, context) {
    const { window: w, lately, totals, longest_first: first, longest_next: next } = now.gateway;
    const good = w.completed ? `${percent(w.attained / w.completed)} of ${count(w.completed)} within limits, last minute` : "nothing completed in the last minute";
    const judged = now.classes.some((c) => c.slo.ttft != null || c.slo.tbt != null);
    this.tile("Goodput", `${rate(lately.attained / Math.max(lately.seconds, 1))}/s`, judged || !w.completed ? good : `${count(w.completed)} completed in the last minute; no limits are set`);
    this.tile("TTFT, P90", seconds(w.ttft.p90), spread(w.ttft, context.slo.told.ttft), ratio(w.ttft.p90, context.slo.ttft));
    this.tile("TBT, P90", seconds(w.tbt.p90), spread(w.tbt, context.slo.told.tbt), ratio(w.tbt.p90, context.slo.tbt));
    const r = now.requests;
    const waiting = (r.held ?? 0) + (r.room ?? 0) + (r.resubmitted ?? 0);
    const decoding = (r.moving ?? 0) + (r.decoding ?? 0);
    this.tile("In flight", count(waiting + (r.prefill ?? 0) + decoding), `${count(waiting)} wait, ${count(r.prefill ?? 0)} prefill, ${count(decoding)} decode`);
    this.tile("Output", perSecond(this.total("tokens"), ""), `tokens; ${perSecond(this.total("prompt_tokens"), "")} of prompts`);
    const cached = share(this.total("cached_tokens"), this.total("prompt_tokens"));
    this.tile("Prompt tokens cached", percent(cached ?? share(totals.cached_tokens, totals.prompt_tokens)), `${percent(share(totals.cached_tokens, totals.prompt_tokens))} since start`);
    const refused = Object.entries(w.refused).sort((a, b) => b[1] - a[1]);
    const n = refused.reduce((sum, [, times]) => sum + times, 0);
    this.tile("Refused", count(n), refused.length ? `mostly ${refused[0][0]}, last minute` : "in the last minute", null, n ? "warn" : "");
    this.tile("Longest wait now", seconds(Math.max(first, next)), first || next ? `first token ${seconds(first)}, next ${seconds(next)}` : "nobody waits");
  }

  tile(name, value, note, level = null, mood = "") {
    const { figure, soft, line, box } = this.tiles.get(name);
    put(figure, value);
    put(soft, note);
    bar(line, level);
    if (box.dataset.mood !== mood) box.dataset.mood = mood;
  }

  refusals(now) {
    const lately = now.gateway.window.refused;
    const rows = Object.entries(now.gateway.refused).map(([reason, ever]) => ({ reason, lately: lately[reason] ?? 0, ever }));
    rows.sort((a, b) => b.lately - a.lately || b.ever - a.ever || (a.reason < b.reason ? -1 : 1));
    this.refused.show(rows, (r) => r.reason, {});
    const answers = Object.entries(now.gateway.answers).filter(([status]) => status !== "0").map(([status, n]) => `${status}: ${count(n)}`);
    put(byId("answers"), answers.length ? `HTTP answers of this gateway by status, all paths: ${answers.join(" · ")}` : "");
  }

  status(level, text) {
    const node = byId("status");
    if (node.dataset.level !== level) node.dataset.level = level;
    put(byId("status-text"), text);
    const title = `${level === "good" ? "" : `${text} – `}Moonpool`;
    if (document.title !== title) document.title = title;
  }

  // Rates, from the counters of the last seconds

  remember(now) {
    if (this.past.length && this.past.at(-1).life !== now.life) this.past = [];
    const parts = new Map(now.parts.map((p) => [p.id, p.counters ?? {}]));
    this.past.push({ at: now.at, life: now.life, parts, totals: now.gateway.totals });
    while (this.past.length > 2 && this.past[1].at <= now.at - RATE_SECONDS) this.past.shift();
  }

  /** Of what `read` gives, a second; null where it is not known, or has begun anew. */
  slope(read) {
    const [old, last] = [this.past[0], this.past.at(-1)];
    const [a, b] = [read(old), read(last)];
    return old === last || a == null || b == null || b < a ? null : (b - a) / (last.at - old.at);
  }

  rate(part, name) {
    return this.slope((past) => past.parts.get(part.id)?.[name]);
  }

  total(name) {
    return this.slope((past) => past.totals[name]);
  }
}

/** The limits where all classes have the same; else null, for there is no single one to draw. `told`: in words. */
export function limits(classes) {
  const all = (name) => [...new Set(classes.filter((c) => c.name !== BATCH).map((c) => c.slo[name] ?? null))];
  const only = (name) => (all(name).length === 1 ? all(name)[0] : null);
  const tell = (name) => (all(name).length > 1 ? "limits by class" : only(name) == null ? "no limit" : `limit ${seconds(only(name))}`);
  return { ttft: only("ttft"), tbt: only("tbt"), told: { ttft: tell("ttft"), tbt: tell("tbt") } };
}

function tile(list, name) {
  const figure = element("span", { class: "value" }, NONE);
  const line = element("span", { class: "bar", "aria-hidden": "true" }, element("span"));
  const soft = element("span", { class: "soft" });
  const box = element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, figure, line, soft));
  list.append(box);
  return { figure, soft, line, box };
}

function stage(list, name, note, kind = "") {
  const figure = element("span", { class: "value" }, NONE);
  const item = element("li", { class: `stage ${kind}`.trim() }, element("span", { class: "name" }, name), figure, element("span", { class: "soft" }, note));
  list.append(item);
  return (n) => {
    put(figure, count(n));
    item.classList.toggle("busy", !kind && n > 0);
  };
}

function spread(s, said) {
  return s.count ? `${said} · P50 ${seconds(s.p50)}, P99 ${seconds(s.p99)}` : said;
}

const limit = (s) => (s == null ? "none" : seconds(s));
const ratio = (value, limit_) => (value == null || limit_ == null ? null : value / limit_);
const ssd = (p) => p.counters?.ssd_capacity_bytes || null;
const found = (p) => share(p.counters?.hit_blocks, (p.counters?.hit_blocks ?? 0) + (p.counters?.missed_blocks ?? 0));

function perSecond(n, unit, say = rate) {
  return n == null ? NONE : unit ? `${say(n)} ${unit}/s` : `${say(n)}/s`;
}

function health(p) {
  if (p.health !== "up") return p.health || NONE;
  return p.silent_seconds > SILENT_SECONDS ? `silent for ${seconds(p.silent_seconds)}` : "up";
}

function copies(prefix) {
  if (!prefix.copies.length) return "none any more";
  return prefix.copies
    .map((c) => {
      const part = c.blocks < prefix.blocks ? ` ${c.blocks} of ${prefix.blocks} blocks` : "";
      return `${c.node}${part}${c.ssd_blocks ? ` (${c.ssd_blocks} on SSD)` : ""}`;
    })
    .join(", ");
}

/** Level and words: the first thing that somebody on call should know. */
function verdict(now) {
  if (now.problem) return ["bad", `Placement pauses: ${now.problem}`];
  if (now.lacks) return ["bad", `Not serving: ${now.lacks}`];
  const broken = now.parts.filter((p) => p.counters?.integrity_failures);
  if (broken.length) return ["bad", `The books of ${broken[0].id} do not balance`];
  const sick = now.parts.filter((p) => health(p) !== "up");
  if (sick.length) return ["warn", `${sick[0].id}: ${health(sick[0])}${more(sick)}`];
  const vague = now.parts.filter((p) => p.kind === "node" && p.index !== "exact");
  if (vague.length) return ["warn", `The index of ${vague[0].id} is ${vague[0].index}${more(vague)}`];
  const lost = now.parts.filter((p) => p.counters?.ssd_lost_volumes);
  if (lost.length) return ["warn", `${lost[0].id} has given up a disk${more(lost)}`];
  const { window: w, lately } = now.gateway;
  if (w.completed >= 10 && w.attained < ATTAIN * w.completed) return ["warn", `Limits are missed: ${percent(w.attained / w.completed)} attain`];
  const refusals = Object.values(lately.refused).reduce((a, b) => a + b, 0);
  if (refusals) return ["warn", `Refusing ${rate(refusals / Math.max(lately.seconds, 1))} requests/s`];
  return ["good", now.gateway.running + now.gateway.waiting ? "Healthy" : "Healthy, idle"];
}

const more = (parts) => (parts.length > 1 ? `, and ${parts.length - 1} more` : "");
