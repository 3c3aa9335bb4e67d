// Why one request went where it went: its story from /cluster/requests/ID, in a dialog.

import { byId, count, element, NONE, seconds } from "./say.js";

const HASH = "#request=";

export class Explain {
  /** `fetch`: the stories of a request; throws an Error that says what is wrong. */
  constructor(fetch) {
    this.fetch = fetch;
    this.dialog = byId("explain");
    byId("explain-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      if (location.hash.startsWith(HASH)) history.replaceState(null, "", location.pathname + location.search);
    });
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  follow() {
    if (!location.hash.startsWith(HASH)) return;
    const name = location.hash.slice(HASH.length);
    try {
      this.open(decodeURIComponent(name));
    } catch {
      this.open(name);
    }
  }

  async open(id) {
    const body = byId("explain-body");
    history.replaceState(null, "", `${location.pathname}${location.search}${HASH}${encodeURIComponent(id)}`);
    byId("explain-title").textContent = `Request ${id}`;
    body.replaceChildren(element("p", { class: "soft" }, "Asking the Conductor …"));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const stories = await this.fetch(id);
      body.replaceChildren(...stories.map(story));
    } catch (e) {
      body.replaceChildren(element("p", { class: "notice", role: "alert" }, e.message));
    }
  }
}

function story(told) {
  const lines = [
    ...told.moments.map((m) => [m.at, ["arrived", "taken over"].includes(m.what) ? 0 : 3, moment(m)]),
    ...told.waitings.map((w) => [w.first_at, 1, [strong("held"), `${w.reason}${w.times > 1 ? `; looked at ${w.times} times` : ""}`]]),
    ...told.weighings.map((w) => [w.at, 2, weighing(w)]),
  ];
  lines.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const items = lines.map(([at, , content]) =>
    element("li", {}, element("span", { class: "when" }, `${(at - told.arrived_at).toFixed(3)} s`), element("div", { class: "what" }, ...content)));
  const label = told.label ? `, x-request-id ${told.label}` : "";
  const left = told.left_out ? [element("p", { class: "soft" }, `${told.left_out} events in between are left out.`)] : [];
  return element("section", { class: "story" }, element("h3", {}, `${told.request}${label}: ${told.outcome}`), element("ol", {}, ...items), ...left);
}

const strong = (text) => element("strong", {}, text);
const SECONDS = ["time_left", "slo_ttft", "slo_tbt", "retry_after", "expected_ttft"];

function moment(m) {
  const facts = Object.entries(m.facts).filter(([, value]) => value !== null && value !== "");
  const said = facts.map(([name, value]) => {
    const is_time = name.endsWith("_seconds") || SECONDS.includes(name);
    const shown = is_time ? seconds(value) : typeof value === "number" ? count(value) : value;
    return element("span", { class: "fact" }, element("span", { class: "soft" }, `${name.replaceAll("_", " ")} `), shown);
  });
  return [strong(m.attempt > 1 ? `${m.what}, attempt ${m.attempt}` : m.what), ...said];
}

function weighing(w) {
  const predicted = seconds(w.waited_seconds + w.ttft_seconds);
  const limits = [w.slo_ttft == null ? "" : `first token ${seconds(w.slo_ttft)}`, w.slo_tbt == null ? "" : `step ${seconds(w.slo_tbt)}`].filter(Boolean);
  const head = `weighed by ${w.policy}: first token predicted ${predicted} after arrival, steps of ${seconds(w.tbt_seconds)}; ${limits.length ? `limits ${limits.join(", ")}` : "no limits"}`;
  const ttft = (a, b) => (b.id === w.chosen_prefill) - (a.id === w.chosen_prefill) || a.ttft_seconds - b.ttft_seconds;
  const tbt = (a, b) => (b.id === w.chosen_decode) - (a.id === w.chosen_decode) || a.tbt_seconds - b.tbt_seconds;
  const prefill = table("What each prefill instance would have cost", ["prefill", "queue", "hit blocks", "fetch", "waits", "computes", "first token", "decode"],
    [...w.prefill].sort(ttft).map((c) => [c.id === w.chosen_prefill, c.id, seconds(c.queue_seconds), `${c.hit_blocks} of ${w.blocks}`,
      c.fetch_blocks ? `${c.fetch_blocks} of ${c.fetch_from}` : NONE, seconds(c.fetch_seconds), seconds(c.compute_seconds), seconds(c.ttft_seconds), c.decode]));
  const decode = table("What each decode instance would have cost", ["decode", "step", "holds blocks"],
    [...w.decode].sort(tbt).map((d) => [d.id === w.chosen_decode, d.id, seconds(d.tbt_seconds), `${d.held_blocks} of ${w.blocks}`]));
  const verdict = w.verdict === "placed" ? [] : [element("p", {}, strong(w.verdict), ` ${w.reason}`)];
  return [head, prefill, decode, ...verdict];
}

function table(caption, names, rows) {
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map(([chosen, id, ...cells]) =>
    element("tr", { class: chosen ? "chosen" : null }, element("th", { scope: "row" }, id, chosen ? element("span", { class: "unseen" }, " (chosen)") : ""), ...cells.map((cell) => element("td", {}, cell))));
  const made = element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "wide", role: "region", "aria-label": caption, tabindex: "0" }, made);
}
