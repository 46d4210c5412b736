// The playground: a conversation with the model. Knows messages and parameters, not the engine.

import { ask, events } from "./api.js";
import { render } from "./text.js";

const $ = (id) => document.getElementById(id);
const HINTS = ["What is the capital of France?", "Explain the tides to a child.", "Write a short poem about rain."];
const messages = [];
let running = null;

function element(name, className = "", text = "") {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (text) found.textContent = text;
  return found;
}

function turn(role) {
  $("welcome").hidden = true;
  const box = element("article", `turn ${role}`);
  box.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const text = element("div", "text");
  box.append(text);
  $("turns").append(box);
  return { box, text };
}

/** Keeps the end in sight, unless the reader has scrolled up. */
function follow(change) {
  const box = $("turns");
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  change();
  if (near) box.scrollTop = box.scrollHeight;
}

function parameters() {
  const found = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    const value = $(name).value.trim();
    if (value !== "") found[name] = Number(value);
  }
  const system = $("system").value.trim();
  found.messages = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  return found;
}

async function answer() {
  const controller = new AbortController();
  const clock = { sent: performance.now(), first: 0, last: 0, count: 0, usage: null, finish: "" };
  const { box, text } = turn("assistant");
  const foot = element("div", "foot"), told = element("span");
  foot.append(told);
  box.append(foot);
  let said = "", thought = "", stale = false;
  running = controller;
  busy(true);
  text.classList.add("caret");
  const paint = () => {
    stale = false;
    follow(() => {
      text.replaceChildren(...(thought ? [element("div", "thought", thought)] : []), ...render(said));
      told.textContent = figures(clock);
    });
  };
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(parameters()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json())?.error?.message ?? `HTTP ${response.status}`);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) clock.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const content = choice.delta?.content ?? "", reasoning = choice.delta?.reasoning_content ?? "";
      if (content || reasoning) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        clock.count += 1;
        said += content;
        thought += reasoning;
      }
      clock.finish = choice.finish_reason ?? clock.finish;
      if (!stale) {
        stale = true;
        requestAnimationFrame(paint);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") clock.finish = "stopped";
    else box.insertBefore(element("p", "error", error.message), foot).setAttribute("role", "alert");
  }
  running = null;
  busy(false);
  text.classList.remove("caret");
  paint();
  if (said) messages.push({ role: "assistant", content: said });
  foot.append(button("Copy", () => navigator.clipboard?.writeText(said)), button("Again", () => again(box)));
  foot.dataset.done = clock.finish || "error";
}

function button(name, act) {
  const found = element("button", "", name);
  found.type = "button";
  found.addEventListener("click", act);
  return found;
}

/** Tokens by the server's usage once it is there, by chunks until then. */
function figures(clock) {
  if (!clock.first) return "waiting for the first token";
  const count = clock.usage?.completion_tokens ?? clock.count;
  const seconds = (clock.last - clock.first) / 1000;
  const parts = [`${count} tokens`, `first after ${Math.round(clock.first - clock.sent)} ms`];
  if (count > 1 && seconds > 0) parts.splice(1, 0, `${((count - 1) / seconds).toFixed(1)} tokens/s`);
  if (clock.finish === "length") parts.push("cut at the most tokens");
  if (clock.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function again(box) {
  if (running) return;
  const turns = [...$("turns").querySelectorAll(".turn")];
  for (const later of turns.slice(turns.indexOf(box))) later.remove();
  const users = $("turns").querySelectorAll(".turn.user").length;
  let seen = 0;
  const cut = messages.findIndex((message) => message.role === "user" && ++seen === users);
  messages.length = cut + 1;
  answer();
}

function busy(is) {
  $("stop").hidden = !is;
  $("send").hidden = is;
  $("turns").setAttribute("aria-busy", String(is));
}

function say(content) {
  if (running || !content) return;
  messages.push({ role: "user", content });
  follow(() => (turn("user").text.textContent = content));
  $("turns").scrollTop = $("turns").scrollHeight;
  answer();
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

export function startChat(models) {
  $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  $("welcome-model").textContent = `${models[0].id} is listening, with a context of ${models[0].max_model_len.toLocaleString("en")} tokens.`;
  $("hints").replaceChildren(...HINTS.map((hint) => button(hint, () => say(hint))));
  $("max_tokens").max = models[0].max_model_len;
  if (matchMedia("(max-width: 820px)").matches) $("parameters").open = false;
  else if (!$("chat").hidden) $("prompt").focus();
  for (const output of document.querySelectorAll("output[for]")) {
    const slider = $(output.htmlFor.value);
    const show = () => (output.textContent = Number(slider.value).toFixed(2));
    slider.addEventListener("input", show);
    show();
  }
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const content = $("prompt").value.trim();
    if (running || !content) return;
    $("prompt").value = "";
    grow();
    say(content);
  });
  $("prompt").addEventListener("input", grow);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "/" && !event.target.matches("input, textarea, select") && !$("chat").hidden) {
      event.preventDefault();
      $("prompt").focus();
    }
  });
  $("fresh").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    for (const old of $("turns").querySelectorAll(".turn")) old.remove();
    $("welcome").hidden = false;
    $("prompt").focus();
  });
}
