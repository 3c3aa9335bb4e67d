// Asks for the newest snapshot once a second while somebody looks, and hands it to what draws.

import { Charts } from "./charts.js";
import { Decisions } from "./decisions.js";
import { Explain } from "./explain.js";
import { Figures } from "./figures.js";
import { byId, put } from "./say.js";

const EVERY_MS = 1000;
const IDLE_MS = 5000;
const IDLE_AFTER = 15; // snapshots in which nothing has happened
const CALL_MS = 8000;
const KEY = "moonpool-key";
const THEME = "moonpool-theme";
const THEMES = ["system", "light", "dark"];

class KeyWanted extends Error {}

/** The JSON at `path`. Throws KeyWanted, or an Error that says what is wrong. */
async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(CALL_MS) });
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => ({}));
  const message = told.error?.message ?? `the gateway answered ${answer.status}`;
  if (answer.status === 401 || answer.status === 403) throw new KeyWanted(message);
  throw Object.assign(new Error(message), { status: answer.status });
}

class Dashboard {
  constructor() {
    this.after = 0;
    this.life = "";
    this.paused = false;
    this.calm = 0;
    this.before = "";
    this.timer = 0;
    this.charts = new Charts();
    this.figures = new Figures();
    this.explain = new Explain((id) => this.story(id));
    this.decisions = new Decisions((id) => this.explain.open(id));
  }

  async poll() {
    clearTimeout(this.timer);
    if (this.paused || document.hidden || byId("key").open) return;
    const began = performance.now();
    try {
      this.take(await get(`cluster/live?after=${this.after}`));
    } catch (e) {
      if (e instanceof KeyWanted) {
        this.askKey(e.message);
        return;
      }
      this.figures.silent(e.name === "TimeoutError" || e instanceof TypeError ? "the gateway does not answer" : e.message);
    }
    const every = this.calm >= IDLE_AFTER ? IDLE_MS : EVERY_MS;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), Math.max(every - (performance.now() - began), 100));
  }

  take({ samples, now }) {
    if (now.life !== this.life) this.charts.forget();
    this.life = now.life;
    this.after = now.number;
    const said = JSON.stringify([now.requests, now.gateway.totals, now.parts.length, now.problem]);
    const busy = now.gateway.running + now.gateway.waiting > 0 || said !== this.before;
    this.calm = busy ? 0 : this.calm + 1;
    this.before = said;
    this.figures.show(now);
    this.decisions.show(now.decided);
    this.charts.add(samples, now);
  }

  async story(id) {
    try {
      return await get(`cluster/requests/${encodeURIComponent(id)}`);
    } catch (e) {
      if (e instanceof KeyWanted) this.askKey(e.message);
      throw e;
    }
  }

  askKey(message) {
    const tried = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    put(byId("key-problem"), tried ? message : "");
    this.figures.silent(message);
    if (!byId("key").open) byId("key").showModal();
  }

  listen() {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key-value").value.trim());
      byId("key-value").value = "";
      byId("key").close();
    });
    byId("key").addEventListener("close", () => this.poll());
    byId("key").addEventListener("cancel", () => this.pause(true));
    byId("pause").addEventListener("click", () => this.pause(!this.paused));
    document.addEventListener("visibilitychange", () => this.poll());
    byId("theme").addEventListener("click", () => {
      const at = THEMES.indexOf(localStorage.getItem(THEME) ?? "system");
      localStorage.setItem(THEME, THEMES[(at + 1) % THEMES.length]);
      this.dress();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.repaint());
  }

  pause(is_paused) {
    this.paused = is_paused;
    byId("pause").classList.toggle("on", is_paused);
    put(byId("pause"), is_paused ? "Resume" : "Pause");
    this.poll();
  }

  dress() {
    const theme = localStorage.getItem(THEME) ?? "system";
    document.documentElement.dataset.theme = theme;
    put(byId("theme"), `Theme: ${theme}`);
    this.charts.repaint();
  }
}

const dashboard = new Dashboard();
dashboard.dress();
dashboard.listen();
dashboard.poll();
