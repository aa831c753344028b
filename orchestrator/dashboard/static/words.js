// Words, numbers and elements for every part of the page. Everything that comes from outside (names,
// sentences) enters through textContent only, so nothing that a script or a job is called can become
// markup.

export const $ = (id) => document.getElementById(id);

/** Do it when a dialog was closed. The event may come after the dialog has been opened again, and is then nobody's. */
export function onClosed(id, then) {
  $(id).addEventListener("close", () => { if (!$(id).open) then(); });
}

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const NONE = "–";
export const ROWS_MAX = 100;

export function usd(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  const digits = size >= 1 || size < 5e-7 ? 2 : size >= 0.01 ? 3 : size >= 0.001 ? 4 : 6;
  const text = size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${value < 0 ? "−" : ""}$${text}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return NONE;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days ${Math.floor((s % 86400) / 3600)} h`;
}

export const milliseconds = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`);
export const count = (n) => n.toLocaleString("en");
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
/** A moment that may be days away: with its date unless that is today's. */
export function dated(at, now = Date.now() / 1000) {
  const [then, today] = [at, now].map((s) => new Date(s * 1000));
  if (then.toDateString() === today.toDateString()) return clock(at);
  const year = then.getFullYear() === today.getFullYear() ? {} : { year: "numeric" };
  return `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...year })} ${clock(at).slice(0, 5)}`;
}
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function number(value) {
  if (!value) return value === 0 ? "0" : NONE;
  const size = Math.abs(value);
  return size >= 1e5 || size < 0.01 ? value.toPrecision(3) : value.toFixed(size >= 100 ? 1 : 4);
}

export const TONE = {
  RUNNING: "busy", SUCCEEDED: "good", FAILED: "bad", CANCELLED: "", RECOVERING: "wait",
  PENDING: "wait", PROVISIONING: "wait", DRAINING: "wait",
  intended: "wait", pending: "wait", booting: "wait", ready: "good", working: "good",
  noticed: "bad", leaving: "bad", silent: "bad", ending: "wait", ended: "",
};

// The name of a pool may break after its slashes, and nowhere else if that is enough.
export const breakable = (name) => name.split(/(?<=\/)/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));

export const pill = (text) => el("span", { class: `pill ${TONE[text] ?? ""}` }, text.toLowerCase());

export function bar(fraction, tone = "") {
  const fill = el("i");
  fill.style.width = `${Math.min(100, Math.max(0, fraction * 100))}%`;
  return el("div", { class: `bar ${tone}` }, fill);
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; n >= 1000 && at < units.length - 1; at += 1) n /= 1000;
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

// A note is its reason alone, and nobody is named twice in a row.
export function told({ who, what, because }) {
  const reason = [`${who}: `, `${who} `].reduce((text, start) => (text.startsWith(start) ? text.slice(start.length) : text), because);
  return what === "note" ? [reason, null] : [what, reason];
}
