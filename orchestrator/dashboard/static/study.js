// What a person looks into of a job: the checkpoints that it can be gone on from, one step of it as it
// was predicted and as it was, and how it compares with another job.

import { value } from "./api.js";
import * as changes from "./changes.js";
import { $, bytes, count, dated, duration, el, milliseconds, NONE, number, onClosed, plural, svg, usd } from "./words.js";

const LOOK_MS = 500;
const ROW = 18; // the height of a worker's row in a picture of a step
const WIDE = 1000;
const LINES = ["c0", "c1", "c2", "c3"];

const shown = { turn: 0, timer: 0, jobs: [] };

/** Remember the jobs that can be chosen for a comparison. */
export const know = (jobs) => { shown.jobs = jobs; };

/** Open the dialog, and return what fills it unless another question was asked meanwhile. */
export function open(title) {
  const turn = ++shown.turn;
  clearTimeout(shown.timer);
  $("study-title").textContent = title;
  $("study-note").textContent = "Reading ...";
  $("study-body").replaceChildren();
  if (!$("study").open) $("study").showModal();
  return (note, ...parts) => {
    if (turn !== shown.turn || !$("study").open) return false;
    $("study-note").textContent = note;
    $("study-body").replaceChildren(...parts);
    return true;
  };
}

const path = (job, what) => `/api/jobs/${encodeURIComponent(job.id)}/${what}`;

// --- checkpoints -----------------------------------------------------------------------------------

export async function checkpoints(job) {
  const fill = open(`Checkpoints of ${job.id}`);
  try {
    const found = (await value(path(job, "checkpoints"))).checkpoints;
    const rows = found.map((one) => {
      const name = `Resume from step ${count(one.step)}`;
      const begin = el("button", { type: "button", class: "small admin", "aria-label": name, onclick: () => { $("study").close(); changes.branch(job, one.step); } }, "Resume from here");
      return el("tr", {}, el("th", { scope: "row", class: "number" }, count(one.step)), el("td", { class: "number" }, new Date(one.at_s * 1000).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "short" })),
        el("td", { class: "number wide" }, bytes(one.state_bytes)), el("td", {}, begin));
    });
    const head = el("tr", {}, ...[["Step", "number"], ["Written", "number"], ["Size", "number wide"], ["New job", ""]].map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
    fill(found.length ? "Each is whole. A new job goes on from one, and this job stays unchanged." : "None is stored on the manager's disk yet.",
      ...(found.length ? [el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))] : []));
  } catch (error) {
    fill(error.message);
  }
}

// --- one step --------------------------------------------------------------------------------------

/** The bars of one panel, a row for each worker, on the scale of the longest panel. */
function panel(one, found, whole) {
  const rows = found.workers.length;
  const x = (s) => ((s / whole) * WIDE).toFixed(2);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${rows * ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": `${one.name}: ${milliseconds(one.took_s)}, ${plural(rows, "worker")}` });
  for (const [row, kind, stage, microbatch, start, end] of one.bars) {
    const bar = svg("rect", { x: x(start), y: row * ROW + 2, width: Math.max(0.3, x(end) - x(start)), height: ROW - 4, fill: found.kinds[kind] });
    bar.append(svg("title", {}, `${kind}, stage ${stage + 1}, microbatch ${microbatch}: ${milliseconds(start)} to ${milliseconds(end)}`));
    drawing.append(bar);
  }
  drawing.style.height = `${rows * ROW}px`;
  const names = el("ol", {}, ...found.workers.map((name) => el("li", { title: name }, name.slice(-8))));
  const more = one.left_out ? `, ${count(one.left_out)} later bars left out` : "";
  return [el("h3", {}, `${one.name[0].toUpperCase()}${one.name.slice(1)} `, el("span", { class: "quiet" }, `${milliseconds(one.took_s)}${more}`)),
    el("div", { class: "gantt" }, names, drawing)];
}

function drawn(found) {
  const whole = Math.max(...found.panels.map((one) => one.took_s), 1e-9);
  const used = new Set(found.panels.flatMap((one) => one.bars.map((bar) => bar[1])));
  const legend = Object.entries(found.kinds).filter(([kind]) => used.has(kind)).map(([kind, colour]) => {
    const swatch = el("i");
    swatch.style.background = colour;
    return el("li", {}, swatch, kind);
  });
  return [el("ul", { class: "legend" }, ...legend), ...found.panels.flatMap((one) => panel(one, found, whole)),
    el("p", { class: "quiet" }, `0 to ${milliseconds(whole)} from left to right, a row for each worker.`)];
}

export async function step(job) {
  const fill = open(`One step of ${job.id}`);
  const last = () => value(path(job, "step")).catch(() => null);
  const show = (found, note = "") => {
    const record = job.status === "RUNNING" ? el("button", { type: "button", class: "small admin", onclick: again }, found ? "Record another step" : "Record a step") : null;
    const about = found ? `Step ${count(found.step)} at ${dated(found.at_s)}, layout ${found.layout}${found.panels.length < 2 ? "; nothing is predicted, because the model was not measured" : ""}.` : "No step was recorded yet.";
    return fill(note || about, ...(record ? [record] : []), ...(found ? drawn(found) : []));
  };
  async function again() {
    try {
      const before = await last();
      show(before, (await value(path(job, "step"), { method: "POST" })).would);
      const look = async () => {
        const found = await last();
        if (found) return show(found);
        if ($("study").open) shown.timer = setTimeout(look, LOOK_MS);
      };
      await look();
    } catch (error) {
      fill(error.message);
    }
  }
  show(await last());
}

// --- two jobs --------------------------------------------------------------------------------------

function losses(jobs) {
  const points = jobs.flatMap((one) => one.losses);
  if (points.length < 2) return [];
  const [xs, ys] = [points.map((one) => one[0]), points.map((one) => one[1])];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => `${(((x - x0) / (x1 - x0 || 1)) * WIDE).toFixed(1)} ${(196 - ((y - y0) / (y1 - y0 || 1)) * 192).toFixed(1)}`;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} 200`, preserveAspectRatio: "none", role: "img", "aria-label": "Loss by step" });
  const legend = jobs.map((one, i) => {
    const line = svg("path", { class: "line", d: one.losses.length ? `M${one.losses.map(place).join("L")}` : "" });
    line.style.stroke = `var(--${LINES[i]})`;
    drawing.append(line);
    const swatch = el("i");
    swatch.style.background = `var(--${LINES[i]})`;
    return el("li", {}, swatch, one.id);
  });
  return [el("h3", {}, "Loss by step ", el("span", { class: "quiet" }, `${number(y1)} to ${number(y0)}, steps ${count(x0)} to ${count(x1)}`)),
    el("div", { class: "losses" }, drawing), el("ul", { class: "legend" }, ...legend)];
}

const ROWS = [
  ["Status", (one) => one.job.status.toLowerCase()], ["Steps", (one) => count(one.job.step)], ["Loss", (one) => number(one.job.loss)],
  ["Time", (one) => duration(one.job.took_s)], ["A step", (one) => (one.job.step_s ? milliseconds(one.job.step_s) : NONE)],
  ["Layout", (one) => one.job.layout || NONE], ["Machines taken away", (one) => count(one.job.preemptions)], ["Steps lost", (one) => count(one.job.steps_lost)],
  ["Machine hours", (one) => one.machine_hours.toFixed(2)], ["On demand", (one) => usd(one.job.on_demand_usd)], ["Saved", (one) => usd(one.job.saved_usd)],
  ["1,000 steps", (one) => usd(one.usd_per_1000_steps)], ["Spent", (one) => usd(one.job.spent_usd)],
];

function table(jobs) {
  const head = el("tr", {}, el("td", {}), ...jobs.map((one) => el("th", { scope: "col", class: "number" }, el("code", {}, one.id))));
  const row = (name, write, kind = "") => el("tr", {}, el("th", { scope: "row", class: kind }, name), ...jobs.map((one) => el("td", { class: "number" }, write(one))));
  const causes = [...new Set(jobs.flatMap((one) => Object.keys(one.causes)))].filter((cause) => jobs.some((one) => one.causes[cause]));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...ROWS.map(([name, write]) => row(name, write)),
    ...causes.map((cause) => row(cause, (one) => (one.causes[cause] ? usd(one.causes[cause]) : NONE), "quiet"))));
}

export async function compare(job) {
  const fill = open(`Compare ${job.id}`);
  const others = shown.jobs.filter((one) => one.id !== job.id);
  if (!others.length) return fill("There is no other job to compare it with.");
  const choice = el("select", { "aria-label": "The other job" }, ...others.map((one) => el("option", { value: one.id }, `${one.id} (${one.status.toLowerCase()})`)));
  const place = el("div");
  const look = async () => {
    try {
      const words = new URLSearchParams([["job", job.id], ["job", choice.value]]);
      const { jobs } = await value(`/api/compare?${words}`);
      place.replaceChildren(table(jobs), ...losses(jobs));
    } catch (error) {
      place.replaceChildren(el("p", {}, error.message));
    }
  };
  choice.addEventListener("change", look);
  fill("With", choice, place);
  await look();
}

export function prepare() {
  $("study-close").addEventListener("click", () => $("study").close());
  onClosed("study", () => { shown.turn += 1; clearTimeout(shown.timer); });
}
