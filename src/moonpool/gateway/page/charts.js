// Lines over the last ten minutes, drawn by uPlot (a script of its own, loaded before this one).

import { limits } from "./figures.js";
import { bytes, count, element, percent, put, rate, seconds } from "./say.js";

const MOST_POINTS = 620;
const LEAST_SPAN = 60;
const MOST_SPAN = 600;
const GAP_SECONDS = 15;
const OVER_SECONDS = 10;
const HEIGHT = 150;
const FONT = "11px system-ui, sans-serif";

/** Columns of a sample, in the order in which the gateway writes them (`gateway/live.py`). */
const COLUMNS = ["number", "at", "attained", "completed", "refused", "ttft50", "ttft90", "ttft99", "tbt50", "tbt90", "tbt99",
  "held", "prefill", "decoding", "promptTokens", "cachedTokens", "outputTokens", "movedBytes"];

const ROUND = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** Each line: name, what of the points, colour, dash. */
const CHARTS = [
  { at: "top", title: "Requests", say: (n) => `${rate(n)}/s`, lines: [
    ["within limits", "attained", "--c2", []], ["completed", "completed", "--c0", [6, 3]], ["refused", "refused", "--c1", [2, 3]]] },
  { at: "top", title: "Time to first token", say: seconds, limit: "ttft", lines: [
    ["P50", "ttft50", "--c0", []], ["P90", "ttft90", "--c1", [6, 3]], ["P99", "ttft99", "--c3", [2, 3]]] },
  { at: "top", title: "Time between tokens, slowest tenth", say: seconds, limit: "tbt", lines: [
    ["P50", "tbt50", "--c0", []], ["P90", "tbt90", "--c1", [6, 3]], ["P99", "tbt99", "--c3", [2, 3]]] },
  { at: "top", title: "Requests by phase", say: count, steps: ROUND, lines: [
    ["waiting", "held", "--c1", [2, 3]], ["prefill", "prefill", "--c0", [6, 3]], ["decode", "decoding", "--c2", []]] },
  { at: "kvcache", title: "Prompt tokens cached", say: percent, most: 1, lines: [["hit ratio", "hitRatio", "--c2", []]] },
  { at: "kvcache", title: "Link traffic between nodes", say: (n) => (n == null ? "–" : `${bytes(n)}/s`), steps: BINARY, room: 70, lines: [["moved", "moved", "--c0", []]] },
  { at: "kvcache", title: "Tokens", say: (n) => `${rate(n)}/s`, lines: [
    ["prompt", "promptRate", "--c0", [6, 3]], ["output", "outputRate", "--c2", []]] },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Charts {
  constructor() {
    this.points = [];
    this.limits = limits([]);
    this.charts = CHARTS.map((chart) => new Chart(chart, this.limits));
  }

  forget() {
    this.points.length = 0;
  }

  add(samples, now) {
    for (const sample of samples) {
      const point = Object.fromEntries(COLUMNS.map((name, at) => [name, sample[at]]));
      const before = this.points.at(-1);
      if (before && point.at - before.at > GAP_SECONDS) this.points.push({ at: before.at + 1 });
      this.points.push(this.derive(point));
    }
    this.points.splice(0, Math.max(0, this.points.length - MOST_POINTS));
    Object.assign(this.limits, limits(now.classes));
    for (const chart of this.charts) chart.draw(this.points, now.at);
  }

  /** What is counted since the start becomes what came in the last seconds. */
  derive(point) {
    const old = this.points.findLast((p) => p.at <= point.at - OVER_SECONDS) ?? this.points.find((p) => p.number);
    const slope = (name) => (old?.[name] == null || point[name] == null || point[name] < old[name] ? null : (point[name] - old[name]) / (point.at - old.at));
    point.promptRate = slope("promptTokens");
    point.outputRate = slope("outputTokens");
    point.moved = slope("movedBytes");
    point.hitRatio = point.promptRate ? slope("cachedTokens") / point.promptRate : null;
    return point;
  }

  repaint() {
    for (const chart of this.charts) chart.plot.redraw();
  }
}

class Chart {
  constructor(chart, shared) {
    this.chart = chart;
    this.limits = shared;
    this.span = [Date.now() / 1e3 - LEAST_SPAN, Date.now() / 1e3];
    this.names = chart.lines.map(([name, , stroke, dash]) => {
      const figure = element("span", { class: "figure" }, "–");
      const swatch = element("span", { class: "swatch", "aria-hidden": "true", "data-dash": dash.length ? (dash[0] > 3 ? "dashed" : "dotted") : "solid" });
      swatch.style.borderTopColor = `var(${stroke})`;
      return { figure, item: element("li", {}, swatch, `${name} `, figure) };
    });
    this.limit = element("li");
    this.canvas = element("div", { class: "canvas", role: "img", "aria-label": `Chart of the last minutes: ${chart.title}. The newest values are in the list above.` });
    const figure = element("figure", { class: "panel" }, element("figcaption", {}, chart.title),
      element("ul", { class: "legend" }, ...this.names.map((n) => n.item), ...(chart.limit ? [this.limit] : [])), this.canvas);
    document.querySelector(`[data-charts="${chart.at}"]`).append(figure);
    this.data = [[], ...chart.lines.map(() => [])];
    this.plot = new uPlot(this.options(), this.data, this.canvas);
    new ResizeObserver(() => this.fit()).observe(this.canvas);
    this.fit();
  }

  options() {
    const { chart } = this;
    const axis = { stroke: () => colour("--soft"), font: FONT, ticks: { show: false } };
    const grid = { stroke: () => colour("--rule"), width: 1 };
    return {
      width: 300,
      height: HEIGHT,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false },
      scales: { x: { time: true, range: () => this.span }, y: { range: (_, __, most) => [0, this.top(most)] } },
      series: [{}, ...chart.lines.map(([, , stroke, dash]) => ({
        stroke: () => colour(stroke), dash, width: 1.75, points: { show: false }, spanGaps: false,
      }))],
      axes: [
        { ...axis, grid: { show: false }, size: 28, gap: 6, space: 62, values: (_, ticks) => ticks.map(clock) },
        { ...axis, grid, size: chart.room ?? 54, gap: 4, space: 30, ...(chart.steps ? { incrs: chart.steps } : {}), values: (_, ticks) => ticks.map((v) => (v === 0 ? "0" : chart.say(v))) },
      ],
      hooks: { setCursor: [() => this.tell()], draw: [(plot) => this.drawLimit(plot)] },
    };
  }

  get limitValue() {
    return this.chart.limit ? this.limits[this.chart.limit] : null;
  }

  /** Room above the highest line; the limit is in sight unless all is far below it. */
  top(most) {
    if (this.chart.most) return this.chart.most;
    const limit = this.limitValue;
    const highest = most > 0 ? most : 0;
    return Math.max(highest, limit != null && (limit <= 4 * highest || !highest) ? limit : 0) * 1.12 || 1;
  }

  draw(points, now) {
    const span = Math.min(Math.max(points.length ? now - points[0].at : 0, LEAST_SPAN), MOST_SPAN);
    this.span = [now - span, now];
    this.data = [points.map((p) => p.at), ...this.chart.lines.map(([, of]) => points.map((p) => p[of] ?? null))];
    this.plot.setData(this.data);
    this.tell();
    if (this.chart.limit) {
      put(this.limit, this.limits.told[this.chart.limit]);
      this.limit.classList.toggle("limit", this.limitValue != null);
    }
  }

  /** The values under the pointer, else the newest. */
  tell() {
    if (!this.names) return;
    const at = this.plot?.cursor.idx ?? this.data[0].length - 1;
    this.names.forEach(({ figure }, line) => {
      const value = this.data[line + 1][at];
      put(figure, value == null ? "–" : this.chart.say(value));
    });
  }

  drawLimit(plot) {
    const limit = this.limitValue;
    if (limit == null || limit > plot.scales.y.max) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(limit, "y", true)) + 0.5;
    ctx.save();
    ctx.strokeStyle = colour("--limit");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

const clock = (at) => {
  const time = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(time.getHours())}:${two(time.getMinutes())}${time.getSeconds() ? `:${two(time.getSeconds())}` : ""}`;
};
