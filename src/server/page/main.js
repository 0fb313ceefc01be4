// The page: theme, key, views, shortcuts.

import { get, key, loading, setKey } from "./api.js";
import * as attach from "./attach.js";
import * as chat from "./chat.js";
import { $, h, saved } from "./dom.js";
import * as files from "./export.js";
import * as machine from "./machine.js";
import * as models from "./models.js";
import * as settings from "./settings.js";

// ---- theme ----

const THEMES = ["auto", "light", "dark"];
const isDark = matchMedia("(prefers-color-scheme: dark)");
let theme = saved("localStorage", "moeba-theme") || "auto";

function showTheme() {
  const dark = theme === "dark" || (theme === "auto" && isDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = `Theme: ${theme}`;
  $("theme").title = `Switch to ${themeAfter()} (t)`;
}

const themeAfter = () => THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];

function nextTheme() {
  theme = themeAfter();
  saved("localStorage", "moeba-theme", theme);
  showTheme();
}

isDark.addEventListener("change", showTheme);
showTheme();

// ---- views of narrow pages ----

/** Whether the server has let this page in. */
let isConnected = false;
const watch = () => isConnected && machine.watch(failed);

function showView(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll(".views button")) {
    if (button.dataset.view === name) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  watch();
}

// ---- the machine's panel on wide pages ----

const PANEL = "moeba-machine";
let isPanelHidden = saved("localStorage", PANEL) === "hidden";

function showPanel() {
  document.body.classList.toggle("no-machine", isPanelHidden);
  $("panel").textContent = isPanelHidden ? "Show the machine" : "Hide the machine";
  $("panel").setAttribute("aria-expanded", String(!isPanelHidden));
  watch();
}

function switchPanel(isHidden = !isPanelHidden) {
  isPanelHidden = isHidden;
  saved("localStorage", PANEL, isHidden ? "hidden" : "");
  showPanel();
}

// ---- key and state of the server ----

function failed(error) {
  // An answer to an earlier key says nothing of this one.
  if (error.status === 401 && error.key === key()) askForKey(error.message);
  if (error.status === 0 && isConnected) connect();
}

/** `wrong`: what the server has against the key that was used. */
function askForKey(wrong = "") {
  const dialog = $("key-dialog");
  $("key-wrong").textContent = wrong;
  $("key-wrong").hidden = !wrong;
  if (dialog.open) return;
  $("key-input").value = key();
  dialog.showModal();
  $("key-input").select();
}

/** Which way to the server is the newest. */
let attempt = 0;

/** Waits for the server, and shows what it says of itself. */
async function connect() {
  const mine = ++attempt;
  const banner = $("banner");
  isConnected = false;
  machine.lose();
  for (let pause = 500; !(await isReady(banner)); pause = Math.min(1.5 * pause, 3000)) {
    banner.hidden = false;
    await new Promise((done) => setTimeout(done, pause));
    if (mine !== attempt) return;
  }
  if (mine !== attempt) return;
  banner.hidden = true;
  try {
    await models.look();
    await describe();
  } catch (error) {
    if (mine !== attempt) return;
    failed(error);
    if (error.status === 0) return connect();
    if (error.status === 401) return;
  }
  if (mine !== attempt) return;
  isConnected = true;
  machine.reopen(failed);
}

/** Shows what the server says of the model. */
async function describe() {
  const query = models.query();
  const props = await get(`props${query}`);
  // Another model may be shown by now.
  if (query !== models.query()) return describe();
  $("model").textContent = props.model_alias;
  $("model").title = $("models").title = `${props.model_path}, ${props.build_info}`;
  models.note(props);
  return settings.showDefaults(props);
}

/** Shows another model, or one that is loaded now. */
function showModel() {
  if (!isConnected) return;
  describe().catch(failed);
  machine.lose();
  machine.reopen(failed);
}

/** Whether the server has its model; says on the banner what is the matter. */
async function isReady(banner) {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (response.ok) return true;
    banner.textContent = `The model is being loaded, ${loading(await response.json())}`;
  } catch {
    banner.textContent = "The server cannot be reached. The page tries again by itself.";
  }
  return false;
}

/** Says why the browser keeps nothing. */
function trouble(sentence) {
  $("trouble").textContent = sentence;
  $("trouble").hidden = !sentence;
}

$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "save") return;
  setKey($("key-input").value.trim());
  connect();
});

// ---- shortcuts ----

const SHORTCUTS = [
  ["/", "Write a message", () => $("prompt").focus()],
  ["n", "New chat", chat.fresh],
  ["e", "Edit your last message", chat.editLast],
  ["r", "Answer again", chat.regenerateLast],
  ["p", "Replay the last answer with its seed", chat.replayLast],
  ["[", "Previous version", () => chat.step(-1)],
  ["]", "Next version", () => chat.step(1)],
  ["s", "Settings", () => $("settings").querySelector("summary").click()],
  ["f", "Search all chats", () => { showView("list"); $("search").focus(); }],
  ["m", "Map of the experts", () => { switchPanel(false); showView("machine"); $("heatmap").focus(); }],
  ["h", "Hide or show the machine", () => switchPanel()],
  ["c", "Chat", () => { showView("chat"); $("messages").focus(); }],
  ["t", "Theme", nextTheme],
  ["k", "API key", () => askForKey()],
  ["?", "This list", () => $("help-dialog").showModal()],
];
const FIXED = [["Enter", "Send"], ["Shift + Enter", "New line"], ["Esc", "Stop the answer"], ["Arrows", "Move in the map"]];

$("shortcuts").append(...[...FIXED, ...SHORTCUTS].map(([name, what]) =>
  h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, name)), h("td", {}, what))));

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    showMore(false);
    // There it empties the field.
    const isElsewhere = event.target.id === "search" || document.querySelector("dialog[open]");
    if (chat.isBusy() && !isElsewhere) chat.stop();
  }
  const isField = event.target.closest("input, textarea, select, dialog");
  if (isField || event.ctrlKey || event.metaKey || event.altKey) return;
  const shortcut = SHORTCUTS.find(([name]) => name === event.key);
  if (!shortcut) return;
  event.preventDefault();
  shortcut[2]();
});

// ---- controls ----

/** What is typed outlives a reload. */
const DRAFT = "moeba-draft";
const prompt = $("prompt");
/** On a screen's keyboard Enter makes a line, as Shift+Enter is not there. */
const isTouch = matchMedia("(pointer: coarse)");
const hint = () => {
  prompt.placeholder = isTouch.matches ? "Ask something." : "Ask something. Enter sends, Shift+Enter makes a line.";
  prompt.enterKeyHint = isTouch.matches ? "enter" : "send";
};
isTouch.addEventListener("change", hint);
hint();
prompt.addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || !(event.shiftKey || isTouch.matches);
  if (event.key === "Enter" && sends && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!chat.send(prompt.value, attach.attached())) return;
  attach.clear();
  prompt.value = "";
  saved("sessionStorage", DRAFT, "");
});
prompt.value = saved("sessionStorage", DRAFT);
prompt.addEventListener("input", () => saved("sessionStorage", DRAFT, prompt.value));
attach.build(chat.say);
$("stop").addEventListener("click", chat.stop);
$("conversations").addEventListener("click", ({ target }) => { if (target.closest(".open")) showView("chat"); });
$("new").addEventListener("click", () => { showView("chat"); chat.fresh(); });
$("export-json").addEventListener("click", () => files.asJson(chat.shown()));
$("export-markdown").addEventListener("click", () => files.asMarkdown(chat.shown()));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async (event) => {
  try {
    chat.take(await files.fromFile(event.target.files[0]));
  } catch (error) {
    chat.say(`The file cannot be read: ${error.message}`);
  }
  event.target.value = "";
});
$("theme").addEventListener("click", nextTheme);
$("panel").addEventListener("click", () => switchPanel());
$("key").addEventListener("click", () => askForKey());
$("help").addEventListener("click", () => $("help-dialog").showModal());
for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}
document.addEventListener("visibilitychange", watch);
window.addEventListener("resize", watch);

/** Opens or closes the menu that narrow pages have. */
function showMore(isOpen) {
  $("tools").classList.toggle("open", isOpen);
  $("more").setAttribute("aria-expanded", String(isOpen));
}
$("more").addEventListener("click", (event) => {
  event.stopPropagation();
  showMore($("more").getAttribute("aria-expanded") === "false");
});
document.addEventListener("click", (event) => { if (!event.target.closest("#theme")) showMore(false); });

models.build({ picked: chat.keepModel, shown: showModel });
settings.build({ changed: (note) => ($("settings-note").textContent = note), keep: chat.keepSettings });
showView("chat");
showPanel();
connect();
await chat.start(failed, trouble);
