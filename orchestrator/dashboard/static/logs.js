// The lines that a job's script has printed: the newest follow, a word is searched for in older ones.

import { value } from "./api.js";
import { $, dated, el, onClosed, plural } from "./words.js";

const FRESH_MS = 2000;
const SETTLE_MS = 300;

const shown = { job: null, timer: 0, question: null, newest: "" };

async function load() {
  clearTimeout(shown.timer);
  shown.question?.abort();
  const question = new AbortController();
  shown.question = question;
  const word = $("logs-find").value;
  try {
    const words = new URLSearchParams(word ? { contains: word } : {});
    const found = await value(`/api/jobs/${encodeURIComponent(shown.job)}/logs?${words}`, { signal: question.signal });
    draw(found, word);
  } catch (error) {
    if (question.signal.aborted) return;
    $("logs-note").textContent = error.message;
  }
  if (!word && $("logs").open) shown.timer = setTimeout(load, FRESH_MS);
}

function draw({ lines, more }, word) {
  const place = $("logs-lines");
  const at = `${word} ${lines.length} ${lines.at(-1)?.id ?? ""}`;
  $("logs-note").textContent = !lines.length ? (word ? "No line has that." : "Nothing was printed yet.")
    : `${plural(lines.length, "line")}${more ? `, the last; all of them: orchestrator logs ${shown.job}` : ""}`;
  if (at === shown.newest) return;
  shown.newest = at;
  const low = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  place.replaceChildren(...lines.map((line) => el("li", {},
    el("time", {}, dated(Number(line.id.split("-")[0]) / 1000)), el("span", { class: "who" }, line.worker), marked(line.line, word))));
  if (low) place.scrollTop = place.scrollHeight;
}

function marked(text, word) {
  const at = word ? text.toLowerCase().indexOf(word.toLowerCase()) : -1;
  if (at < 0) return el("code", {}, text);
  return el("code", {}, text.slice(0, at), el("mark", {}, text.slice(at, at + word.length)), text.slice(at + word.length));
}

export function open(job) {
  Object.assign(shown, { job: job.id, newest: "" });
  $("logs-title").textContent = `Log of ${job.id}`;
  $("logs-find").value = "";
  $("logs-lines").replaceChildren();
  $("logs").showModal();
  load();
}

export function prepare() {
  $("logs-close").addEventListener("click", () => $("logs").close());
  onClosed("logs", () => {
    clearTimeout(shown.timer);
    shown.question?.abort();
  });
  $("logs-find").addEventListener("input", () => {
    clearTimeout(shown.timer);
    shown.timer = setTimeout(load, SETTLE_MS);
  });
}
