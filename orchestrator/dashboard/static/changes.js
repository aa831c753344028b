// What a person may change: each says first what it would do, and does it after that is confirmed.

import { session, value } from "./api.js";
import { $, count, duration, el, onClosed, usd } from "./words.js";

const SETTLE_MS = 250;
const SAID_MS = 12000;

const asked = { path: "", fixed: {}, fields: [], timer: 0, question: null };

/** Show what only an admin may do, or hide it. */
export function permit() {
  const admin = session.role === "admin";
  document.body.classList.toggle("read-only", !admin);
  $("role").hidden = admin || !session.role;
}

function say(text, bad) {
  $("said").textContent = text;
  $("said").className = bad ? "said bad" : "said";
  $("said").hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { $("said").hidden = true; }, SAID_MS);
}

function words() {
  const found = { ...asked.fixed };
  for (const { name, input, read } of asked.fields) {
    const text = input.value.trim();
    if (text !== "") found[name] = read(text);
  }
  return found;
}

/** Ask what the change would do as it stands in the fields; a newer question replaces an older one. */
async function explain() {
  asked.question?.abort();
  const question = new AbortController();
  asked.question = question;
  $("change-do").disabled = true;
  try {
    const found = words();
    if (asked.fields.length && asked.needed && !Object.keys(found).length) {
      $("change-would").textContent = "Fill in what is to change; what is left empty stays.";
      return;
    }
    if (asked.show && !$("change-would").childNodes.length) $("change-would").textContent = "Deciding ...";
    const answer = await value(`${asked.path}?${new URLSearchParams(found)}`, { signal: question.signal });
    if (asked.show) return $("change-would").replaceChildren(...asked.show(answer));
    $("change-would").textContent = answer.would;
    $("change-do").disabled = false;
  } catch (error) {
    if (question === asked.question) $("change-would").textContent = error.message;
  }
}

function open({ title, path, act, danger, fixed = {}, fields = [], needed = false, show = null }) {
  Object.assign(asked, { path, fixed, fields, needed, show });
  $("change-title").textContent = title;
  $("change-would").textContent = "";
  $("change-do").hidden = show !== null;
  $("change-not").textContent = show ? "Close" : "Leave it";
  $("change-do").textContent = act ?? "";
  $("change-do").className = danger ? "danger" : "main";
  $("change-fields").replaceChildren(...fields.map(({ label, input }) => el("label", {}, label, input)));
  $("change").showModal();
  explain();
}

async function confirm() {
  $("change-do").disabled = true;
  try {
    const { would } = await value(asked.path, { method: "POST", body: words() });
    $("change").close();
    say(would);
  } catch (error) {
    $("change-would").textContent = error.message;
  }
}

function field(name, label, properties, read = Number) {
  const input = el("input", { type: "number", min: 0, step: "any", ...properties });
  input.addEventListener("input", () => {
    clearTimeout(asked.timer);
    asked.timer = setTimeout(explain, SETTLE_MS);
  });
  return { name, label, input, read };
}

const at = (job, what) => `/api/jobs/${encodeURIComponent(job.id)}/${what}`;
const until = (text) => (Number(text) ? Date.now() / 1000 + 3600 * Number(text) : 0);

export const cancel = (job) => open({ title: `Cancel ${job.id}?`, path: at(job, "cancel"), act: "Cancel the job", danger: true });
export const resume = (job) => open({ title: `Resume ${job.id}?`, path: at(job, "resume"), act: "Resume" });

export const branch = (job, step) => open({ title: `Resume from step ${count(step)} of ${job.id}?`, path: at(job, "resume-from"), act: "Begin the new job", fixed: { step } });

export const bounds = (job) => open({
  title: `Budget and deadline of ${job.id}`, path: at(job, "bounds"), act: "Change", needed: true,
  fields: [
    field("budget_usd", "Budget in dollars, 0 for none", { placeholder: job.budget_usd ?? "none" }),
    field("deadline_s", "Deadline in hours from now, 0 for none", { placeholder: job.deadline_s ? ((job.deadline_s - Date.now() / 1000) / 3600).toFixed(1) : "none" }, until),
  ],
});

/** What the manager would decide under other terms, beside what it decides now. */
function foreseen({ now, then, took_s }) {
  const row = (name, write) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, write(now)), el("td", {}, write(then)));
  return [
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}), el("th", { scope: "col" }, "As it is"), el("th", { scope: "col" }, "What if"))), el("tbody", {},
      row("Machines", (one) => count(one.machines)), row("Per hour", (one) => usd(one.usd_per_h)),
      row("Done in", (one) => duration(one.finish_in_s)), row("Final cost", (one) => `${usd(one.final_usd)}${one.over_budget ? ", over the budget" : ""}`))),
    ...then.sentences.map((said) => el("span", { class: "sub" }, said)),
    el("span", { class: "sub quiet" }, `Decided in ${Math.round(took_s * 1000)} ms; nothing was done.`),
  ];
}

export const whatIf = (job) => open({
  title: `What if ${job.id} had other terms?`, path: at(job, "what-if"), show: foreseen,
  fields: [
    field("budget_usd", "Budget in dollars", { placeholder: job.budget_usd ?? "none" }),
    field("deadline_s", "Deadline in hours from now", {}, until),
    field("slots_max", "Most workers", { min: 1, step: 1 }),
    field("regions", "Regions, with commas between", { type: "text", placeholder: "as set" }, String),
  ],
});

export const drill = () => open({
  title: "Take machines away, to see what happens?", path: "/api/drill", act: "Take them", danger: true,
  fields: [field("nodes", "Machines", { value: 1, min: 1, step: 1 }), field("warning_s", "Seconds of notice, 0 for none", { value: 120 })],
});

export function prepare() {
  $("change-not").addEventListener("click", () => $("change").close());
  $("change-do").addEventListener("click", confirm);
  onClosed("change", () => asked.question?.abort());
  $("change").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT" && !$("change-do").disabled) confirm();
  });
  $("drill").addEventListener("click", drill);
}
