// The footprint over time: machines by pool, throughput and cost, with every notice, loss and morph.
// The charts are drawn by uPlot; a mark's sentence is shown where the pointer or the keyboard is.

import { value } from "./api.js";
import { $, clock, dated, el, plural, told, usd } from "./words.js";

const RANGES = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["1 day", 86400], ["1 week", 604800], ["All", 0]];
const AROUND_S = 450; // on each side of a moment that a link names
const NEAR_PX = 9;
const FRESH_MS = 5000;
const LEAST_S = 10;
const SYNC = "footprint";
const HEIGHTS = [200, 90, 116];
const MARK = {
  notice: "amber", eviction: "red", loss: "red", failure: "red", refusal: "amber", layout: "blue", checkpoint: "green",
  status: "quiet", finish: "green", budget: "red", order: "blue",
};

const now = { last: 3600, from: null, to: null, data: null, charts: [], moment: null, at: null, look: "", busy: false, wanted: false };

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const linked = () => Number(new URLSearchParams(location.hash.slice(1)).get("t")) || null;
const isLive = () => now.from === null;

// --- which time --------------------------------------------------------------------------------

function query() {
  const words = new URLSearchParams({ points: Math.min(600, Math.max(60, Math.floor($("footprint-card").clientWidth / 3))) });
  if (now.from !== null) {
    words.set("from_s", now.from);
    words.set("to_s", now.to);
  } else if (now.last) {
    words.set("last_s", now.last);
  }
  return words;
}

/** Fetch and draw; a question that comes meanwhile is asked once after that. */
async function load() {
  if (now.busy) {
    now.wanted = true;
    return;
  }
  now.busy = true;
  try {
    now.data = await value(`/api/footprint?${query()}`);
    draw();
  } catch (error) {
    $("footprint-note").textContent = error.message;
  } finally {
    now.busy = false;
  }
  if (now.wanted) {
    now.wanted = false;
    await load();
  }
}

function go(from, to) {
  const middle = (from + to) / 2;
  const half = Math.max(LEAST_S, to - from) / 2;
  [now.from, now.to] = [Math.max(0, middle - half), middle + half];
  controls();
  return load();
}

function follow(last) {
  [now.last, now.from, now.to] = [last, null, null];
  controls();
  return load();
}

/** The time shown, also while its numbers are on their way. */
const shown = () => (isLive() ? [now.data.from_s, now.data.to_s] : [now.from, now.to]);

function zoom(factor, at) {
  const [from_s, to_s] = shown();
  const middle = at ?? (from_s + to_s) / 2;
  return go(middle - (middle - from_s) * factor, middle + (to_s - middle) * factor);
}

function move(part) {
  const [from_s, to_s] = shown();
  const by = (to_s - from_s) * part;
  return go(from_s + by, to_s + by);
}

function controls() {
  $("ranges").replaceChildren(...RANGES.map(([name, seconds]) => {
    const pressed = isLive() && now.last === seconds;
    return el("button", { type: "button", class: "small", "aria-pressed": String(pressed), onclick: () => follow(seconds) }, name);
  }));
}

// --- drawing -----------------------------------------------------------------------------------

function axes(format, timed) {
  const quiet = color("quiet");
  const grid = { stroke: color("line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  return [
    { stroke: quiet, grid: { show: false }, ticks: grid, font, space: 70, size: timed ? 32 : 6, values: timed ? times : (_, found) => found.map(() => "") },
    { stroke: quiet, grid, ticks: { show: false }, font, size: 62, space: 28, values: (_, found) => found.map((one) => format(one)) },
  ];
}

function times(_, found) {
  const wide = found.length > 1 && found.at(-1) - found[0] > 86400 * 2;
  return found.map((at) => {
    const day = new Date(at * 1000);
    if (wide) return day.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return day.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(found[1] - found[0] < 60 ? { second: "2-digit" } : {}) });
  });
}

function options(height, series, format, more = {}) {
  return {
    width: Math.max(200, $("footprint").clientWidth), height, series, axes: axes(format, more.timed), legend: { show: false },
    padding: [more.top ?? 8, 8, 0, 0],
    scales: { x: { time: true, range: () => [now.data.from_s, now.data.to_s] }, y: { range: (_, least, most) => [0, most > 0 ? most * 1.12 : 1] } },
    cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false }, y: false, points: { size: 5 } },
    hooks: {
      setSelect: [(plot) => plot.select.width > 4 && go(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"))],
      setCursor: [hover],
      draw: [more.draw ?? (() => {}), moment],
    },
  };
}

const stepped = (plot, ...rest) => uPlot.paths.stepped({ align: 1 })(plot, ...rest);

function stack(data) {
  // The highest sum first, so that each pool is painted over the sum of it and all above it.
  const sums = [];
  data.held.forEach((band, i) => sums.push(band.machines.map((held, n) => held + (i ? sums[i - 1][n] : 0))));
  const series = data.held.map((band, i) => ({
    label: band.pool, stroke: color("card"), width: 1, fill: color(`c${i}`), paths: stepped, points: { show: false },
  }));
  return { columns: sums.reverse(), series: series.reverse() };
}

function marks(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  const graver = (mark) => (MARK[mark.kind] === "red" ? 1 : 0);
  for (const mark of [...now.data.marks].sort((a, b) => graver(a) - graver(b))) {
    const x = plot.valToPos(mark.at_s, "x", true);
    ctx.strokeStyle = ctx.fillStyle = color(MARK[mark.kind] ?? "quiet");
    ctx.globalAlpha = mark.kind === "status" ? 0.35 : 0.85;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.arc(x, bbox.top, 3.5 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
  layouts(plot);
}

function layouts(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `600 ${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.fillStyle = color("quiet");
  ctx.textAlign = "left";
  let free = bbox.left;
  for (const shape of now.data.shapes) {
    const from = Math.max(bbox.left, plot.valToPos(shape.from_s, "x", true));
    const text = shape.label.replace("x", "×");
    const width = ctx.measureText(text).width;
    if (from < free || from + width > bbox.left + bbox.width) continue;
    ctx.fillText(text, from, bbox.top - 8 * devicePixelRatio);
    free = from + width + 10 * devicePixelRatio;
  }
  ctx.restore();
}

function moment(plot) {
  if (now.moment === null) return;
  const x = plot.valToPos(now.moment, "x", true);
  const { ctx, bbox } = plot;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = color("text");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.strokeRect(x, bbox.top, 0.01, bbox.height);
  ctx.restore();
}

function plots(data) {
  const stacked = stack(data);
  const line = (name, tone) => ({ label: name, stroke: color(tone), width: 1.75, fill: color(`${tone}-soft`), points: { show: false }, spanGaps: false });
  return [
    ["Machines", options(HEIGHTS[0], [{}, ...stacked.series], amount, { draw: marks, top: 24 }), [data.at_s, ...stacked.columns]],
    ["Steps per second", options(HEIGHTS[1], [{}, line("steps/s", "blue")], amount), [data.at_s, data.steps_per_s]],
    ["Dollars per 1,000 steps", options(HEIGHTS[2], [{}, line("$/1,000 steps", "green")], usd, { timed: true }), [data.at_s, data.work_usd]],
  ];
}

const amount = (one) => one.toLocaleString("en", { maximumSignificantDigits: 4 });

function draw() {
  const { data } = now;
  const known = data.last_s > data.first_s;
  $("footprint-note").textContent = known ? "" : "The history begins with the first machine.";
  $("footprint").hidden = !known;
  if (known) chart(data);
  if (!known) return;
  legend(data);
  list(data);
  describe();
}

/** Put new numbers into the charts that are there, or draw others if they would look otherwise. */
function chart(data) {
  const look = JSON.stringify([data.held.map((band) => band.pool), $("footprint").clientWidth, color("card")]);
  const parts = plots(data);
  if (look === now.look) {
    now.charts.forEach((one, i) => {
      one.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      one.setData(parts[i][2]);
    });
    return;
  }
  now.look = look;
  for (const one of now.charts) one.destroy();
  now.charts = [];
  $("footprint").replaceChildren();
  for (const [name, wanted, columns] of parts) {
    $("footprint").append(el("div", { class: "name" }, name));
    const made = new uPlot(wanted, columns, $("footprint"));
    made.over.addEventListener("click", () => choose(made));
    made.over.addEventListener("dblclick", () => follow(now.last));
    made.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.4 : 1 / 1.4, made.posToVal(event.offsetX, "x"));
    }, { passive: false });
    now.charts.push(made);
  }
}

function legend(data) {
  $("footprint-legend").replaceChildren(...data.held.map((band, i) => {
    const swatch = el("i");
    swatch.style.background = color(`c${i}`);
    return el("li", {}, swatch, band.pool);
  }));
}

/** The same marks as text, for the keyboard and for those who do not see the chart. */
function list(data) {
  const rows = [...data.marks].reverse();
  $("marks-count").textContent = plural(rows.length, "mark");
  $("marks").replaceChildren(...rows.map((mark) => {
    const [what, why] = told(mark);
    const here = el("a", { href: `#t=${mark.at_s.toFixed(3)}` }, dated(mark.at_s));
    const tone = el("i", { class: `dot ${MARK[mark.kind] ?? "quiet"}` });
    return el("li", { class: mark.at_s === now.moment ? "here" : "" }, here,
      el("div", {}, el("p", {}, tone, el("span", { class: "who" }, mark.who), ` ${what}`), why ? el("p", {}, why) : null));
  }));
}

// --- the pointer, the keyboard and links ---------------------------------------------------------

function nearest(plot, x) {
  let best = null;
  for (const mark of now.data.marks) {
    const far = Math.abs(plot.valToPos(mark.at_s, "x") - x);
    if (far <= NEAR_PX && (best === null || far <= best.far)) best = { mark, far };
  }
  return best?.mark ?? null;
}

function hover(plot) {
  const { left, idx } = plot.cursor;
  if (left === undefined || left < 0 || idx === null || idx === undefined) return tip(null);
  now.at = nearest(plot, left)?.at_s ?? plot.posToVal(left, "x");
  const { data } = now;
  const held = data.held.map((band) => [band.pool, band.machines[idx]]).filter(([, machines]) => machines);
  const near = data.marks.filter((mark) => Math.abs(plot.valToPos(mark.at_s, "x") - left) <= NEAR_PX).slice(-4);
  const shape = data.shapes.filter((one) => one.from_s <= data.at_s[idx] && one.to_s >= data.at_s[idx]).map((one) => one.label.replace("x", "×"));
  tip(plot, left, el("b", {}, `${new Date(data.at_s[idx] * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(data.at_s[idx])}`),
    el("p", {}, [
      held.length ? held.map(([pool, machines]) => `${amount(machines)} × ${pool}`).join(", ") : "no machine",
      shape.length ? `layout ${shape.join(", ")}` : "",
      data.steps_per_s[idx] ? `${amount(data.steps_per_s[idx])} steps/s` : "",
      data.usd_per_h[idx] ? `${usd(data.usd_per_h[idx])}/h` : "",
      data.work_usd[idx] ? `${usd(data.work_usd[idx])} per 1,000 steps` : "",
    ].filter(Boolean).join(" · ")),
    ...near.map((mark) => {
      const [what, why] = told(mark);
      return el("p", {}, el("i", { class: `dot ${MARK[mark.kind] ?? "quiet"}` }), el("span", { class: "who" }, mark.who), ` ${what}`, why ? `: ${why}` : "");
    }));
}

function tip(plot, left, ...parts) {
  const box = $("tip");
  box.hidden = plot === null;
  if (plot === null) return;
  box.replaceChildren(...parts);
  const frame = $("footprint-card").getBoundingClientRect();
  const x = plot.over.getBoundingClientRect().left - frame.left + left;
  const width = box.offsetWidth;
  box.style.left = `${Math.max(8, Math.min(frame.width - width - 8, x + 14 + width > frame.width ? x - width - 14 : x + 14))}px`;
}

function choose(plot) {
  if (plot.select.width > 4 || now.at === null) return;
  location.hash = `t=${now.at.toFixed(3)}`;
}

function describe() {
  const { moment } = now;
  $("moment").hidden = moment === null;
  if (moment === null) return;
  $("moment-at").textContent = `${new Date(moment * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })} ${clock(moment)}`;
}

/** Show the moment that the address names, in the time around it. */
function arrive() {
  const at = linked();
  if (at === now.moment) return;
  now.moment = at;
  if (at === null) return void (now.data && draw());
  $("marks-box").open = true;
  const near = now.data && at >= now.data.from_s && at <= now.data.to_s;
  if (near) draw();
  else go(at - AROUND_S, at + AROUND_S);
}

const KEYS = {
  ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
  Home: () => follow(0), End: () => follow(RANGES[1][1]), Escape: () => leave(),
};

function leave() {
  history.replaceState(null, "", location.pathname);
  now.moment = null;
  return follow(now.last);
}

function press(event) {
  const act = KEYS[event.key];
  if (!act || !now.data || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

let begun = false;

/** Begin with the first message; the newest time is fetched every few seconds, if it is shown. */
export function begin() {
  if (begun) return;
  begun = true;
  controls();
  now.moment = null;
  if (linked() !== null) arrive();
  else load();
  setInterval(() => { if (isLive() && !document.hidden) load(); }, FRESH_MS);
  addEventListener("hashchange", arrive);
  $("footprint-card").addEventListener("keydown", press);
  $("footprint-card").addEventListener("mouseleave", () => tip(null));
  $("moment-leave").addEventListener("click", leave);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => now.data && draw());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width || !now.data) return;
    width = innerWidth;
    draw();
  });
}
