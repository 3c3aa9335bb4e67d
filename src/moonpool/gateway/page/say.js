// Numbers as text, and elements whose text is only ever text: what comes from requests is never markup.

export const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => (n == null ? NONE : whole.format(n));

const digits = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));

export const rate = (n) => (n == null ? NONE : n === 0 ? "0" : n >= 1000 ? whole.format(n) : digits(n));

export function seconds(s) {
  if (s == null) return NONE;
  if (s === 0) return "0 s";
  return s >= 1 ? `${digits(s)} s` : `${digits(s * 1e3)} ms`;
}

export const percent = (x) => (x == null ? NONE : `${(x * 100).toFixed(x > 0 && x < 0.1 ? 1 : 0)} %`);

export function bytes(n) {
  if (n == null) return NONE;
  for (const [bits, unit] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
    if (n >= 2 ** bits) return `${digits(n / 2 ** bits)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

export function ago(s) {
  if (s < 60) return `${Math.floor(s)} s ago`;
  return s < 3600 ? `${Math.floor(s / 60)} min ago` : `${Math.floor(s / 3600)} h ago`;
}

/** Change the text only where it is another one: what stands still costs no layout and disturbs no reader. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** `element("td", {class: "x"}, "text", child)`; an attribute that is null is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);
