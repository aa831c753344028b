// The lines of the ledger that a cause of money consists of: a link for each cause, read when it is followed.

import { value } from "./api.js";
import { open } from "./study.js";
import { breakable, count, duration, el, NONE, onClosed, usd } from "./words.js";

const OF = "of";
const words = () => new URLSearchParams(location.hash.slice(1));
const when = (s) => new Date(s * 1000).toLocaleString("en-GB", { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit" });

/** A link that opens the lines of this cause; what else the address says stays in it. */
export function link(cause) {
  const follow = (event) => {
    event.preventDefault();
    const to = words();
    to.set(OF, cause);
    history.pushState(null, "", `#${to}`);
    show(cause);
  };
  const made = el("a", { href: `#${OF}=${encodeURIComponent(cause)}`, onclick: follow }, cause);
  made.dataset.focus = `money ${cause}`;
  return made;
}

function row(one) {
  const held = one.from_s === null ? "" : `${when(one.from_s)}, ${one.to_s === null ? "still held" : `for ${duration(one.to_s - one.from_s)}`}`;
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, one.machine || one.token || "no machine"), held ? el("span", { class: "sub" }, held) : null),
    el("td", { class: "wide" }, ...(one.pool ? [el("code", {}, ...breakable(one.pool)), el("span", { class: "sub" }, one.market.replace("_", " "))] : [NONE])),
    el("td", { class: "wide" }, one.job ? el("code", {}, one.job) : NONE),
    el("td", { class: "number" }, one.hours ? duration(3600 * one.hours) : NONE), el("td", { class: "number" }, usd(one.usd)));
}

async function show(cause) {
  const fill = open(`Ledger: ${cause}`);
  try {
    const found = await value(`/api/money/${encodeURIComponent(cause)}`);
    const rest = found.usd - found.entries.reduce((sum, one) => sum + one.usd, 0);
    const head = [["Machine", ""], ["Pool", "wide"], ["Job", "wide"], ["Time", "number"], ["Dollars", "number"]].map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
    const left = found.more ? ` The ${count(found.entries.length)} dearest are shown, and ${usd(rest)} are left out: orchestrator cost --of ${cause}` : "";
    fill(`${usd(found.usd)} in all, a line for each machine and job.${left}`,
      ...(found.entries.length ? [el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...found.entries.map(row)))] : []));
  } catch (error) {
    fill(error.message);
  }
}

/** Follow the address, now and whenever it changes. */
export function begin() {
  const arrive = () => { if (words().get(OF)) show(words().get(OF)); };
  addEventListener("hashchange", arrive);
  onClosed("study", () => {
    const rest = words();
    rest.delete(OF);
    history.replaceState(null, "", location.pathname + (rest.size ? `#${rest}` : ""));
  });
  arrive();
}
