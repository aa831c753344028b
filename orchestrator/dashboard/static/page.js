// The page: draws each message of the stream, and only the parts that have changed.

import { listen, value } from "./api.js";
import * as changes from "./changes.js";
import { begin } from "./footprint.js";
import * as ledger from "./ledger.js";
import * as logs from "./logs.js";
import * as study from "./study.js";
import { $, bar, breakable, bytes, clock, count, dated, duration, el, milliseconds, NONE, number, pill, plural, ROWS_MAX, svg, told, usd } from "./words.js";

// --- curves ------------------------------------------------------------------------------------

const STEEP = 20; // times as high at its highest as at its lowest

function curve(points, width, height, area) {
  const xs = points.map((p) => p[0]);
  const ys = points.map((p) => p[1]).filter((y) => y !== null);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y1 - y0 < Math.abs(y1) * 0.02) [y0, y1] = [y0 - (Math.abs(y1) * 0.02 || 1), y1 + (Math.abs(y1) * 0.02 || 1)];
  const place = ([x, y]) => [
    ((x - x0) / (x1 - x0 || 1)) * width,
    height - 2 - ((y - y0) / (y1 - y0)) * (height - 4),
  ];
  const path = points.filter((p) => p[1] !== null).map((p) => place(p).map((v) => v.toFixed(1)).join(" "));
  const line = `M${path.join("L")}`;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (area) {
    for (const part of [0.02, 0.5, 0.98]) {
      drawing.append(svg("line", { class: "grid", x1: 0, x2: width, y1: height * part, y2: height * part }));
    }
    drawing.append(svg("path", { class: "area", d: `${line}L${width} ${height}L0 ${height}Z` }));
  }
  drawing.append(svg("path", { class: "line", d: line }));
  return drawing;
}

// --- parts of the page -------------------------------------------------------------------------

/** Two figures as one if a person would read the same. */
const between = (least, most, write) => (write(least) === write(most) ? write(least) : `${write(least)} to ${write(most)}`);

function trend({ work_usd, work_mean_usd }) {
  if (!work_usd || !work_mean_usd) return "per 1,000 steps";
  const change = Math.round(100 * (work_usd / work_mean_usd - 1));
  if (!change) return "per 1,000 steps, as its mean so far";
  return `per 1,000 steps, ${change < 0 ? "▼" : "▲"} ${Math.abs(change)} % ${change < 0 ? "under" : "over"} its mean`;
}

function finish(view, { finish_s: at }) {
  if (!at) return [NONE, "when the pace is known"];
  const days = (at.most - view.at_s) / 86400;
  const style = days > 6 ? { day: "numeric", month: "short" } : { weekday: "short", hour: "2-digit", minute: "2-digit" };
  const when = (s) => (days > 1 ? new Date(s * 1000).toLocaleString("en-GB", style) : clock(s).slice(0, 5));
  return [between(at.least, at.most, when), `in ${between(at.least - view.at_s, at.most - view.at_s, duration)}`];
}

function costs(view, sum) {
  const box = (name, value, more, tone = "") =>
    el("div", { class: `cost ${tone}` },
      el("div", { class: "name" }, name),
      el("div", { class: value.length > 12 ? "value long" : "value" }, value),
      el("div", { class: "more" }, more));
  const share = sum.on_demand_usd > 0 ? `${Math.round((100 * sum.saved_usd) / sum.on_demand_usd)} % less than on demand` : "";
  const over = sum.budget_usd !== null && sum.final_usd && sum.final_usd.most + sum.committed_usd > sum.budget_usd;
  const boxes = [
    box("Spent", usd(sum.spent_usd), sum.budget_usd === null ? "no limit set" : `of ${usd(sum.budget_usd)}`),
    box("Reserved", usd(sum.committed_usd), "for what is held"),
    box("Budget left", usd(sum.left_usd), sum.left_usd === null ? "no limit set" : "neither spent nor reserved"),
    box("Now", `${usd(sum.now_usd_per_h)}/h`, plural(sum.machines, "machine")),
    box("Cost of work", usd(sum.work_usd), trend(sum)),
    box("On demand", usd(sum.on_demand_usd), "for the same machine time"),
    box("Saved", usd(sum.saved_usd), share, sum.saved_usd < 0 ? "over" : "saved"),
    box("Work lost", usd(sum.lost_usd), sum.lost_steps ? `${plural(sum.lost_steps, "step")}, ${duration(sum.lost_s)}` : "no step was lost"),
    box("Finish", ...finish(view, sum)),
    box("Final cost", sum.final_usd ? between(sum.final_usd.least, sum.final_usd.most, usd) : NONE, over ? "over the budget" : sum.final_usd ? "at its end" : "when the pace is known", over ? "over" : ""),
  ];
  if (sum.budget_usd) boxes[0].append(bar(sum.spent_usd / sum.budget_usd, sum.spent_usd >= sum.budget_usd ? "failed" : ""));
  return boxes;
}

/** An address as it is typed: a path if it is on a disk of the manager's machine. */
function asPath(uri) {
  try {
    return uri.startsWith("file:///") ? decodeURIComponent(uri.slice("file://".length)) : uri;
  } catch {
    return uri; // no encoding of UTF-8
  }
}

/** When a job has to be done, and whether that was or would be kept; as `orchestrator status JOB` says it. */
function due(job, now) {
  const left = job.deadline_s - (job.ended_at_s ?? now);
  const late = (job.eta_s ?? 0) - left;
  const over = left < 0 ? `missed by ${duration(-left)}` : job.status === "SUCCEEDED" ? "kept" : "not reached";
  const ahead = left < 0 ? `passed ${duration(-left)} ago` : late > 0 ? `at this pace ${duration(late)} too late` : `in ${duration(left)}`;
  return `${dated(job.deadline_s, now)}, ${job.ended_at_s === null ? ahead : over}`;
}

/** What a job has spent of its budget, and whether that will do; as `orchestrator status JOB` says it. */
function paid(job) {
  if (job.budget_usd === null) return usd(job.spent_usd);
  const rest = (job.now_usd_per_h * (job.eta_s ?? 0)) / 3600;
  const short = job.spent_usd + job.reserved_usd + rest - job.budget_usd;
  return `${usd(job.spent_usd)} of ${usd(job.budget_usd)}${rest > 0 && short > 0 ? `, at this cost ${usd(short)} too little` : ""}`;
}

function facts(job, now) {
  const over = job.ended_at_s !== null;
  const rows = [
    ["Layout", job.layout || NONE],
    over ? null : ["Workers", `${count(job.workers)} on ${plural(job.machines, "machine")}`],
    ["Step time", job.step_s > 0 ? milliseconds(job.step_s) : NONE],
    over ? null : ["Now", `${usd(job.now_usd_per_h)}/h`],
    job.deadline_s === null ? null : ["Deadline", due(job, now)],
    ["Spent", paid(job)],
    over ? null : ["Reserved", usd(job.reserved_usd)],
    ["On demand", usd(job.on_demand_usd)],
    ["Saved", job.on_demand_usd > 0 ? `${usd(job.saved_usd)} (${Math.round((100 * job.saved_usd) / job.on_demand_usd)} %)` : usd(job.saved_usd)],
    ["Preemptions", count(job.preemptions)],
    job.failures ? ["Script failures", count(job.failures)] : null,
    ["Steps lost", count(job.steps_lost)],
    ["Last recovery", job.recoveries_s.length ? milliseconds(job.recoveries_s.at(-1)) : NONE],
    over ? null : ["Backup", job.backup_step > 0 ? `step ${count(job.backup_step)}${job.sums_kept ? " and all since" : ""}` : NONE],
    ["Checkpoint", job.checkpoint_step > 0 ? `step ${count(job.checkpoint_step)}` : NONE],
    job.export_uri ? ["Result", asPath(job.export_uri)] : null,
    job.bits ? ["Last bits", job.bits] : null,
  ];
  for (const [name, value] of Object.entries(job.logged)) rows.push([name, number(value)]);
  return el("dl", { class: "facts" }, ...rows.filter(Boolean).map(([name, value]) =>
    el("div", { class: ["Result", "Last bits"].includes(name) ? "long" : "" }, el("dt", {}, name), el("dd", {}, value))));
}

const FILES_MAX = 8;

// What the script has written to session.output, the newest first.
function output(job) {
  if (!job.output_files) return null;
  const rows = job.output.slice(0, FILES_MAX).map((file) => el("li", {}, el("code", {}, file.path),
    el("span", { class: "quiet" }, ` ${bytes(file.size)}, ${file.step < 0 ? "before the first step" : `step ${count(file.step)}`}`)));
  const more = job.output_files - rows.length;
  if (more > 0) rows.push(el("li", { class: "quiet" }, `and ${count(more)} more: orchestrator output ${job.id}`));
  return el("div", { class: "output" },
    el("div", { class: "name" }, `Output: ${plural(job.output_files, "file")}, ${bytes(job.output_bytes)}`), el("ul", {}, ...rows));
}

/** What the script keeps in session.state, as it was told last: a name and a few words each. */
function kept(job) {
  if (!job.state_count) return null;
  const rows = job.state.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), el("td", {}, el("code", {}, value))));
  const more = job.state_count - rows.length;
  if (more > 0) rows.push(el("tr", {}, el("td", { colSpan: 2, class: "quiet" }, `and ${count(more)} more`)));
  const after = job.state_step < 0 ? "before the first step" : `behind step ${count(job.state_step)}`;
  return el("div", { class: "output kept" }, el("div", { class: "name" }, `session.state, ${after}`),
    el("div", { class: "scroll", tabIndex: 0, role: "group", ariaLabel: `session.state of ${job.id}` }, el("table", {}, el("tbody", {}, ...rows))));
}

/** How much of the newest work slower workers have given to faster ones, if any. */
function help(job) {
  if (!job.given) return null;
  return el("p", { class: "name" }, `${count(job.given)} of the last ${count(job.computed)} ${job.tables_stage ? "grains" : "microbatches"} were given to faster workers.`);
}

/** Which stage is computed on which machine, a row for each replica; who is slow stands out. */
function layout(job) {
  if (!job.chains.length) return null;
  const stages = job.chains[0].map((_, i) => el("th", { scope: "col" }, job.chains[0].length > 1 ? `Stage ${i + 1}` : "Whole model"));
  const seat = ({ machine, slot, microbatch_s: s, slow }) => el("td", { class: slow > 1.2 ? "slow" : machine ? "" : "gone" },
    el("code", {}, machine || "gone"),
    el("span", { class: "sub" }, [machine && slot ? `slot ${slot + 1}` : "", s > 0 ? milliseconds(s) : "", slow > 1.2 ? `${slow.toFixed(1)} times slower` : ""].filter(Boolean).join(", ")));
  return el("div", { class: "layout" }, el("div", { class: "name" }, `Layout ${job.layout}: machine by stage, time of a microbatch`),
    el("div", { class: "scroll", tabIndex: 0 }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Replica"), ...stages)),
      el("tbody", {}, ...job.chains.map((chain, i) => el("tr", {}, el("th", { scope: "row" }, count(i + 1)), ...chain.map(seat)))))), help(job));
}

/** Who serves the tables of a job, holds copies of them, and computes. */
function servers(job) {
  if (!job.tables_stage) return null;
  const parts = (n) => `${count(n)} of ${plural(job.partitions, "partition")}`;
  const roles = (one) => [
    one.serves ? `${one.machine ? "ActivePS" : "ParamServ"}, ${parts(one.serves)}` : "",
    one.copies ? `BackupPS, ${parts(one.copies)}` : "",
    one.blocks ? `worker, ${plural(one.blocks, "block")}` : "",
  ].filter(Boolean);
  const rows = job.servers.map((one) => el("tr", {}, el("th", { scope: "row" }, one.machine ? el("code", {}, one.machine) : "the manager's", one.machine && one.machine !== "gone" && one.slot ? el("span", { class: "sub" }, `slot ${one.slot + 1}`) : null),
    el("td", {}, ...(roles(one).length ? roles(one).map((role) => el("div", {}, role)) : ["nothing yet"]))));
  const head = el("tr", {}, ...["Machine", "What it does"].map((name) => el("th", { scope: "col" }, name)));
  return el("div", { class: "layout" }, el("div", { class: "name" }, `Parameter servers: stage ${job.tables_stage}`),
    el("div", { class: "scroll", tabIndex: 0, role: "group", ariaLabel: `Parameter servers of ${job.id}` }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))), help(job));
}

const RESUMABLE = ["FAILED", "CANCELLED"];

function buttons(job) {
  const button = (name, act, kind) => {
    const made = el("button", { type: "button", class: kind, onclick: () => act(job) }, name);
    made.dataset.focus = `${job.id} ${name}`;
    return made;
  };
  const over = job.ended_at_s !== null;
  return el("div", { class: "buttons" },
    button("Log", logs.open, "small"),
    over ? null : button("What if", changes.whatIf, "small"),
    button("Checkpoints", study.checkpoints, "small"),
    over && !job.step ? null : button("A step", study.step, "small"),
    button("Compare", study.compare, "small"),
    job.status === "SUCCEEDED" ? null : button("Budget and deadline", changes.bounds, "small admin"),
    RESUMABLE.includes(job.status) ? button("Resume", changes.resume, "small admin") : null,
    over ? null : button("Cancel", changes.cancel, "small admin"));
}

function job(view, one, points) {
  const fraction = one.steps_total > 0 ? one.step / one.steps_total : 0;
  const tone = one.status === "SUCCEEDED" ? "done" : ["FAILED", "CANCELLED"].includes(one.status) ? "failed" : "";
  const time = one.ended_at_s !== null
    ? `took ${duration(one.took_s)}`
    : one.eta_s !== null ? `${duration(one.eta_s)} left` : `for ${duration(one.took_s)}`;
  const total = one.steps_total > 0 ? ` of ${count(one.steps_total)}` : "";
  const left = el("div", {},
    el("div", { class: "title" }, el("strong", {}, one.script), el("code", { class: "quiet" }, one.id), pill(one.status)),
    el("p", { class: "because" }, one.because),
    el("div", { class: "steps" },
      el("span", {}, el("b", {}, `step ${count(one.step)}`), el("span", { class: "quiet" }, total)),
      el("span", { class: "quiet" }, time)),
    bar(fraction, tone),
    facts(one, view.at_s),
    kept(one),
    output(one),
    buttons(one));
  const losses = (points ?? []).map((point) => point[1]).filter((y) => y !== null);
  const [least, most] = [Math.min(...losses), Math.max(...losses)];
  const steep = least > 0 && most > STEEP * least; // or all but the first steps would be one flat line
  const right = el("div", { class: "curve" },
    el("div", { class: "name" }, steep ? "Loss, logarithmic" : "Loss", el("b", {}, number(one.loss))));
  if (points && points.length > 1) {
    right.append(
      el("div", { class: "axis" }, el("span", {}, number(most))),
      curve(steep ? points.map(([x, y]) => [x, y && Math.log(y)]) : points, 320, 100, true),
      el("div", { class: "axis" }, el("span", {}, number(least)),
        el("span", {}, `steps ${count(points[0][0])} to ${count(points.at(-1)[0])}`)));
  }
  return el("article", { class: "card job" }, left, el("div", {}, right, servers(one) ?? layout(one)));
}

const CARDS_MAX = 6;
const unfolded = new Set();

/** A line that opens into more, which is made only then; what is open stays open when it is drawn anew. */
function fold(id, said, make) {
  const summary = el("summary", {}, ...said);
  summary.dataset.focus = `fold ${id}`;
  const made = el("details", { open: unfolded.has(id) }, summary);
  const fill = () => { if (made.open && made.lastChild === summary) made.append(...make()); };
  made.addEventListener("toggle", () => { unfolded[made.open ? "add" : "delete"](id); fill(); });
  fill();
  return made;
}

function line(view, one) {
  const figures = `step ${count(one.step)} · ${usd(one.spent_usd)}`;
  const said = [el("strong", {}, one.script), " ", el("code", {}, one.id), " ", pill(one.status), " ", el("span", {}, figures)];
  return fold(`job ${one.id}`, said, () => [job(view, one, lossesOf(one))]);
}

function jobs(view) {
  if (!view.jobs.length) {
    return [el("div", { class: "card empty" }, "No job yet. Submit one: ", el("code", {}, "orchestrator submit SCRIPT"))];
  }
  const order = [...view.jobs].sort((a, b) => (a.ended_at_s !== null) - (b.ended_at_s !== null) || b.submitted_at_s - a.submitted_at_s);
  const cards = order.slice(0, CARDS_MAX).map((one) => job(view, one, lossesOf(one)));
  const lines = (list) => list.map((one) => line(view, one));
  const more = order.slice(CARDS_MAX);
  const over = more.filter((one) => one.ended_at_s !== null);
  if (!more.length) return cards;
  const ended = over.length ? fold("ended", [`${plural(over.length, "more job")} ${over.length === 1 ? "has" : "have"} ended`], () => lines(over)) : "";
  return [...cards, el("div", { class: "card flush more" }, ...lines(more.filter((one) => one.ended_at_s === null)), ended)];
}

/** When each phase of a machine's first boot was over, as long as it boots. */
function bootPhases(one) {
  const over = ["pending", "booting"].includes(one.state) ? Object.entries(one.boot) : [];
  return over.map(([phase, seconds]) => el("span", { class: "sub" }, `${phase} ${duration(seconds)}`));
}

function machineTable(view, list, unlisted = 0) {
  const head = el("tr", {}, ...["Machine", "State", "$/h", "Cost"].map((name, i) =>
    el("th", { class: i > 1 ? "number" : "", scope: "col" }, name)));
  const rows = list.slice(0, ROWS_MAX).flatMap((one) => {
    const end = one.ended_at_s ?? view.at_s;
    const discount = Math.round(100 * (1 - one.price_usd_per_h / one.on_demand_usd_per_h));
    const tone = one.ended_at_s === null ? "" : "ended";
    return [
      el("tr", { class: tone },
        el("td", {}, el("code", {}, one.id), el("span", { class: "sub" }, ...breakable(one.pool)),
          view.jobs.length > 1 ? el("span", { class: "sub" }, `for ${one.job}`) : null),
        el("td", {}, pill(one.state), el("span", { class: "sub" }, duration(end - one.launched_at_s)),
          ...bootPhases(one)),
        el("td", { class: "number" }, usd(one.price_usd_per_h),
          el("span", { class: "sub" }, one.market === "spot" ? `${discount} % off` : "on demand"),
          one.bid_usd_per_h ? el("span", { class: "sub" }, `bid ${usd(one.bid_usd_per_h)}`) : null),
        el("td", { class: "number" }, usd(one.cost_usd),
          one.disk_usd ? el("span", { class: "sub" }, `${usd(one.disk_usd)} disk`) : null,
          one.egress_usd ? el("span", { class: "sub" }, `${usd(one.egress_usd)} egress`) : null)),
      el("tr", { class: `why ${tone}` }, el("td", { colSpan: 4 }, one.why_ended || one.why_bought)),
    ];
  });
  const more = Math.max(0, list.length - ROWS_MAX) + unlisted;
  if (more) {
    rows.push(el("tr", {}, el("td", { colSpan: 4 }, `and ${count(more)} more: orchestrator status`)));
  }
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

function machines(view) {
  const live = view.machines.filter((one) => one.ended_at_s === null);
  const ended = view.machines.filter((one) => one.ended_at_s !== null).sort((a, b) => b.ended_at_s - a.ended_at_s);
  const coming = live.filter((one) => one.state === "intended").length;
  const held = view.cost.machines;
  $("machines-count").textContent = [held ? `${count(held)} held` : "", coming ? `${count(coming)} being bought` : ""].filter(Boolean).join(", ");
  const unlisted = view.unlisted.reduce((sum, one) => sum + one.count, 0);
  const parts = [live.length ? machineTable(view, live, unlisted) : el("div", { class: "empty" }, "None is held, so nothing is charged.")];
  if (ended.length) {
    const open = $("machines").querySelector("details")?.open ?? false;
    parts.push(el("details", { open }, el("summary", {}, `${plural(ended.length, "machine")} given back or taken away`), machineTable(view, ended)));
  }
  return parts;
}

/** Why the newest machine that is held in a pool was bought. */
function chosen(view, pool) {
  const held = view.machines.filter((one) => one.pool === pool && one.ended_at_s === null && one.why_bought);
  const newest = held.reduce((best, one) => (best && best.launched_at_s >= one.launched_at_s ? best : one), null);
  return newest && el("span", { class: "sub" }, `chosen: ${newest.why_bought}`);
}

/** The figure of the spot market, and under it that of machines on demand. */
const both = (spot, dear, write) => [write(spot), dear === null ? null : el("span", { class: "sub" }, `on demand ${write(dear)}`)];

/** Why a market of a pool is left alone, and when it is asked again. */
function refusal(view, market, until, because) {
  if (until === null || until <= view.at_s) return null;
  return el("span", { class: "sub" }, `${market} left alone for ${duration(until - view.at_s)}, until ${dated(until, view.at_s)}${because ? `: ${because}` : ""}`);
}

function pools(view, prices) {
  $("pools-count").textContent = view.pools.length ? plural(view.pools.length, "pool") : "";
  if (!view.pools.length) return [el("div", { class: "empty" }, "No prices seen yet.")];
  const columns = [["Pool", ""], ["Slots", "number wide roomy"], ["Spot $/h", "number"], ["On demand $/h", "number wide"], ["Spot price so far", "wide roomy"], ["Taken in 1 h", "number wide"], ["Work $/slot-h", "number"], ["Quota left", "number wide"], ["Held", "number"]];
  const works = view.pools.flatMap((one) => [one.spot_usd_per_slot_h, one.on_demand_usd_per_slot_h]).filter((usd) => usd !== null);
  const least = Math.min(...works);
  const rows = [...view.pools].sort((a, b) => (a.pool < b.pool ? -1 : 1)).map((one) => {
    const spot = one.spot_usd_per_h;
    const points = prices[one.pool];
    const cheapest = [one.spot_usd_per_slot_h, one.on_demand_usd_per_slot_h].includes(least);
    return el("tr", {},
      el("td", {}, el("code", {}, ...breakable(one.pool)), refusal(view, "spot", one.blocked_until_s, one.blocked_because),
        refusal(view, "on demand", one.on_demand_blocked_until_s, one.on_demand_blocked_because), chosen(view, one.pool)),
      el("td", { class: "number wide roomy" }, count(one.slots)),
      el("td", { class: "number" }, usd(spot), spot === null ? null : el("span", { class: "sub" }, `${Math.round(100 * (1 - spot / one.on_demand_usd_per_h))} % off`)),
      el("td", { class: "number wide" }, usd(one.on_demand_usd_per_h)),
      el("td", { class: "wide roomy" }, points && points.length > 1 ? curve(points, 96, 22, false) : NONE),
      el("td", { class: "number wide" }, one.evicted_in_1h === null ? NONE : `${(100 * one.evicted_in_1h).toFixed(one.evicted_in_1h < 0.1 ? 1 : 0)} %`),
      el("td", { class: "number" }, ...both(one.spot_usd_per_slot_h, one.on_demand_usd_per_slot_h, usd), cheapest ? el("span", { class: "sub best" }, "cheapest") : null),
      el("td", { class: "number wide" }, ...both(one.spot_room, one.on_demand_room, (room) => (room === null ? NONE : count(room)))),
      el("td", { class: "number" }, one.held ? el("b", {}, count(one.held)) : NONE));
  });
  const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)));
  const why = view.thought && el("p", { class: "thought" }, `For ${view.thought.job}, decided at ${dated(view.thought.at_s, view.at_s)}: ${view.thought.because}.`);
  const note = works.length ? "Work: what an hour of one slot is expected to cost, with start-up, evictions and refunds, as the decision put the offers in order." : "";
  return [why, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)), note && el("p", { class: "thought quiet" }, note)].filter(Boolean);
}

function events(view) {
  if (!view.events.length) return [el("div", { class: "empty" }, "Nothing has happened yet.")];
  const newest = [...view.events].sort((a, b) => b.at_s - a.at_s);
  return [el("ul", { class: "events", tabIndex: 0, "aria-label": "What happened" }, ...newest.map((one) => {
    const [what, why] = told(one);
    return el("li", {}, el("time", {}, dated(one.at_s, view.at_s)),
      el("div", {}, el("p", {}, el("span", { class: "who" }, one.who), ` ${what}`), why ? el("p", {}, why) : null));
  }))];
}

// --- where the money goes ------------------------------------------------------------------------

const MONEY_MS = 15000;
const TONES = { useful: "c2", redone: "c4", proving: "c3", saving: "c5", restoring: "c1", morphing: "c0", waiting: "c6", idle: "c8", manager: "c7", traffic: "c5" };

async function money() {
  const { lines, meaning } = await value("/api/money");
  const sum = lines.reduce((total, line) => total + line.usd, 0);
  const paid = lines.reduce((total, line) => total + Math.max(0, line.usd), 0);
  const known = lines.filter((line) => Math.abs(line.usd) > 0);
  draw("money", known, () => {
    if (!known.length) return [el("p", { class: "quiet" }, "Nothing was spent that the history knows of.")];
    const part = (line) => {
      const piece = el("i", { title: `${line.key}: ${usd(line.usd)}` });
      piece.style.flexGrow = Math.max(0, line.usd) / paid; // sums below 1 would leave a part of the bar empty
      piece.style.background = `var(--${TONES[line.key] ?? "c9"})`;
      return piece;
    };
    const row = (line) => {
      const swatch = el("i", { class: "dot" });
      swatch.style.background = `var(--${TONES[line.key] ?? "c9"})`;
      return el("tr", {}, el("th", { scope: "row" }, swatch, ledger.link(line.key)), el("td", { class: "number" }, usd(line.usd)),
        el("td", { class: "number" }, sum > 0 ? `${((100 * line.usd) / sum).toFixed(1)} %` : NONE), el("td", { class: "quiet" }, meaning[line.key] ?? ""));
    };
    return [el("div", { class: "parts", "aria-hidden": "true" }, ...known.map(part)),
      el("table", {}, el("tbody", {}, ...known.map(row), el("tr", { class: "sum" }, el("th", { scope: "row" }, "Together"), el("td", { class: "number" }, usd(sum)), el("td", {}), el("td", {}))))];
  });
}

// --- curves of the past, and what has come since -------------------------------------------------

const CURVES_MS = 10000;
const RECENT_MAX = 200;

const past = { losses: {}, prices: {} };
const recent = new Map(); // by job: the points of the stream, which the history does not have yet

function note({ id, step, loss }) {
  const points = recent.get(id) ?? [];
  recent.set(id, points);
  if (loss === null || points.at(-1)?.[0] === step) return;
  while (points.length && points.at(-1)[0] > step) points.pop(); // the job went back
  points.push([step, loss]);
  if (points.length > RECENT_MAX) points.splice(0, RECENT_MAX / 2);
}

function lossesOf(job) {
  const now = recent.get(job.id) ?? [];
  const before = (past.losses[job.id] ?? []).filter(([step]) => step < (now[0]?.[0] ?? Infinity));
  return [...before, ...now];
}

async function curves() {
  Object.assign(past, await value("/api/curves"));
}

let asking = false;

/** Ask for what the history knows, and again while the page is looked at. */
function askPast() {
  if (asking) return;
  asking = true;
  ledger.begin();
  for (const [ask, every] of [[money, MONEY_MS], [curves, CURVES_MS]]) {
    ask().catch(() => {});
    setInterval(() => { if (!document.hidden) ask().catch(() => {}); }, every);
  }
}

// --- drawing what changed ----------------------------------------------------------------------

const drawn = new Map();
let pressed = false; // what is being clicked on must not be replaced under the pointer

for (const kind of ["pointerup", "pointercancel", "blur"]) addEventListener(kind, () => setTimeout(() => { pressed = false; }));
addEventListener("pointerdown", () => { pressed = true; });

function draw(id, data, make) {
  const key = JSON.stringify(data);
  if (pressed || drawn.get(id) === key) return;
  drawn.set(id, key);
  const focus = document.activeElement?.dataset?.focus;
  const place = $(id);
  const scroll = place.firstElementChild?.scrollTop ?? 0;
  place.replaceChildren(...make());
  if (scroll) place.firstElementChild.scrollTop = scroll;
  if (focus) place.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
}

function link(text, tone) {
  $("link").className = `pill ${tone}`;
  $("link").textContent = text;
}

function show({ view, summary, away }) {
  $("away").hidden = !away;
  $("away").textContent = away;
  link(away ? "away" : view ? "live" : "starting", away ? "bad" : view ? "good" : "wait");
  if (!view) return;
  $("known").hidden = false;
  $("deployment").textContent = `${view.deployment} · ${clock(view.at_s)}`;
  document.title = title(view);
  draw("costs", [summary, Math.floor(view.at_s)], () => costs(view, summary));
  changes.permit();
  begin();
  askPast();
  view.jobs.forEach(note);
  study.know(view.jobs);
  draw("jobs", [view.jobs, Math.floor(view.at_s), past.losses], () => jobs(view));
  draw("machines", [view.machines, view.unlisted, view.cost.machines, Math.floor(view.at_s)], () => machines(view));
  draw("pools", [view.pools, view.thought, past.prices], () => pools(view, past.prices));
  draw("events", view.events, () => events(view));
}

function title(view) {
  const running = view.jobs.find((one) => one.ended_at_s === null);
  if (!running) return "spot-orchestrator";
  const done = running.steps_total > 0 ? `${Math.floor((100 * running.step) / running.steps_total)} % · ` : "";
  return `${done}${running.script} · spot-orchestrator`;
}

changes.prepare();
logs.prepare();
study.prepare();
listen(show, link);
