// The frame: tabs, theme, status. Knows which view is open, not what is in it.

import { forgetKey, getJson, hasKey } from "./api.js";
import { startChat } from "./chat.js";
import { startLive } from "./live.js";

const $ = (id) => document.getElementById(id);
const views = ["chat", "live"];
const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("tandem-theme") ?? "system";

function showTheme() {
  const isDark = theme === "dark" || (theme === "system" && dark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").setAttribute("aria-label", `Colour theme: ${theme === "system" ? "as the system" : theme}`);
  $("theme").textContent = { system: "◐", light: "○", dark: "●" }[theme];
  dispatchEvent(new Event("tandem-theme"));
}

function open(view, focus = false) {
  for (const name of views) {
    const chosen = name === view;
    $(name).hidden = !chosen;
    $(`tab-${name}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${name}`).tabIndex = chosen ? 0 : -1;
    if (chosen && focus) $(`tab-${name}`).focus();
  }
  if (location.hash.slice(1) !== view) history.replaceState(null, "", `#${view}`);
  dispatchEvent(new CustomEvent("tandem-view", { detail: view }));
}

function status(figures) {
  const box = $("status");
  if (!figures) {
    box.dataset.state = "bad";
    $("status-text").textContent = "no connection";
    return;
  }
  const busy = figures.running + figures.waiting > 0;
  box.dataset.state = !figures.alive || figures.draining ? "bad" : busy ? "busy" : "idle";
  const waiting = figures.waiting ? ` · ${figures.waiting} waiting` : "";
  const said = busy ? `${figures.running} running${waiting}` : "idle";
  $("status-text").textContent = !figures.alive ? "the engine has stopped" : figures.draining ? "shutting down" : said;
}

for (const name of views) {
  $(`tab-${name}`).addEventListener("click", () => open(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) open(views[(views.indexOf(name) + move + views.length) % views.length], true);
  });
}
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("tandem-theme", theme);
  showTheme();
});
dark.addEventListener("change", showTheme);
addEventListener("hashchange", () => open(views.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat"));

showTheme();
startLive(status);
open(views.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
const { data } = await getJson("v1/models");
startChat(data);
$("forget").hidden = !hasKey();
$("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
