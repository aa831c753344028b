// The key, the session that it is exchanged for, and everything that is asked with it.

// The key comes in the part of the address that a browser sends to nobody, and is exchanged at once:
// for a cookie, which no script can read, and for a token, which this tab keeps for this port alone.
// A browser sends the cookie to every port of this machine, and it opens nothing without the token.
const KEY = "key";
const TOKEN = "token";
const PAUSE_MS = 1000;
const NO_KEY = "Open the address that `orchestrator tools dashboard` prints: it carries the key.";

export const session = { role: "" };

let pending = ""; // a key that is not exchanged yet

function take() {
  const words = new URLSearchParams(location.hash.slice(1));
  const key = words.get(KEY);
  if (!key) return;
  pending = key;
  words.delete(KEY);
  const rest = words.toString();
  history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
}

/** Exchange the key that was given; one that gets no answer is tried again. */
async function open() {
  take();
  if (!pending) return;
  const key = pending;
  const answer = await fetch("/api/session", { method: "POST", headers: { Authorization: `Bearer ${key}` } });
  if (answer.ok) sessionStorage.setItem(TOKEN, (await answer.json()).token);
  if ((answer.ok || answer.status === 401) && pending === key) pending = "";
}

/** Ask with this tab's session; the answer is not ok if its sentence says why not. */
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { "X-Page-Token": sessionStorage.getItem(TOKEN) ?? "" };
  if (body) headers["Content-Type"] = "application/json";
  return fetch(path, { method, headers, signal, cache: "no-store", body: body && JSON.stringify(body) });
}

/** Return the answer's value, or throw its sentence. */
export async function value(path, options) {
  const answer = await ask(path, options);
  const text = await answer.text();
  if (answer.ok) return JSON.parse(text);
  let said = text.trim();
  try {
    said = JSON.parse(text).error ?? said;
  } catch { /* the guard answers in plain text */ }
  throw new Error(said);
}

async function follow(show) {
  const answer = await ask("/api/stream");
  if (answer.status === 401) return show({ view: null, away: NO_KEY });
  if (!answer.ok) throw new Error(await answer.text());
  session.role = (await value("/api/session")).role;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { value: part, done } = await reader.read();
    if (done) throw new Error("the stream has ended");
    const messages = (held + part).split("\n\n");
    held = messages.pop();
    for (const one of messages) if (one.startsWith("data: ")) show(JSON.parse(one.slice(6)));
  }
}

/** Show every message for as long as this page is open; say so while there is no connection. */
export async function listen(show, link) {
  take();
  addEventListener("hashchange", take);
  for (;;) {
    await open().then(() => follow(show)).catch(() => link("reconnecting", "bad"));
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}
