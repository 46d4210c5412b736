// The live view: polls /live and hands the figures to tiles, charts and the timeline. Knows figures, not how they came.

import { getJson } from "./api.js";
import { Chart, drawBlocks } from "./charts.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const FAST_MS = 200, SLOW_MS = 1500, SPEED_S = 2;
const TILES = [
  ["running", "Running"], ["waiting", "Waiting"], ["speed", "Tokens a second"],
  ["ttft", "First token"], ["itl", "Between tokens"], ["active", "Device active"],
];
const CAUSES = {
  plan: "host planning", settle: "host settling", launch: "submit and launch", copy: "copies", nothing: "nothing to do",
};

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  if (seconds < 0.001) return [(seconds * 1e6).toFixed(0), "µs"];
  if (seconds < 1) return [(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0), "ms"];
  return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
}

function tile(name, value, unit = "", note = "") {
  const box = $(`tile-${name}`);
  box.querySelector(".value").replaceChildren(value, ...(unit ? [small(unit)] : []));
  box.querySelector(".note").textContent = note || "\u00a0";
}

function small(text) {
  const found = document.createElement("small");
  found.textContent = text;
  return found;
}

function makeTiles() {
  $("tiles").replaceChildren(...TILES.map(([id, name]) => {
    const box = document.createElement("div");
    box.className = "tile";
    box.id = `tile-${id}`;
    for (const part of ["name", "value", "note"]) {
      const line = document.createElement("div");
      line.className = part;
      line.textContent = part === "name" ? name : "\u00a0";
      box.append(line);
    }
    return box;
  }));
}

function legend(box, entries) {
  box.replaceChildren(...entries.map(([colour, text]) => {
    const entry = document.createElement("span");
    const mark = document.createElement("i");
    mark.style.background = `var(--${colour})`;
    if (colour === "card") mark.style.borderColor = "var(--line)";
    entry.append(mark, text);
    return entry;
  }));
}

function showLegend(depth) {
  const slots = Array.from({ length: depth }, (_, i) => [`slot-${i % 4}`, `slot ${String.fromCharCode(65 + i)}`]);
  const host = ["plan", "submit", "wait", "settle"].map((name) => [name, name]);
  legend($("legend"), [...host, ...slots, ["idle", "device waits"]]);
}

class Speed {
  samples = [];

  /** Tokens a second over the last two seconds. */
  add(now, tokens) {
    this.samples.push([now, tokens]);
    while (this.samples.length > 2 && now - this.samples[1][0] > SPEED_S) this.samples.shift();
    const [then, before] = this.samples[0];
    return now > then ? Math.max(0, (tokens - before) / (now - then)) : 0;
  }
}

export function startLive(onFigures) {
  makeTiles();
  const timeline = new Timeline($("timeline"), $("tip"));
  const charts = { ttft: new Chart($("ttft"), "time"), itl: new Chart($("itl"), "time"), speed: new Chart($("speed"), "count") };
  const speed = new Speed();
  let timer = 0, last = -1, asked = false;

  const visible = () => !$("live").hidden && !document.hidden;

  async function poll() {
    clearTimeout(timer);
    if (asked) return;
    asked = true;
    try {
      const figures = await getJson(`live?after=${last}`);
      if (figures.steps.length) last = figures.steps.at(-1)[0];
      show(figures);
      onFigures(figures);
    } catch {
      onFigures(null);
    }
    asked = false;
    timer = setTimeout(poll, visible() ? FAST_MS : SLOW_MS);
  }

  function show(figures) {
    const now = performance.now() / 1000;
    const rate = speed.add(now, figures.totals.generation_tokens);
    if (figures.depth !== timeline.depth) showLegend(figures.depth);
    timeline.add(figures);
    charts.ttft.add(now, [figures.ttft_s?.p50, figures.ttft_s?.p95]);
    charts.itl.add(now, [figures.itl_s?.p50, figures.itl_s?.p95]);
    charts.speed.add(now, [rate]);
    if (!visible()) return;
    tile("running", figures.running, "", `${figures.totals.finished} finished, ${figures.totals.aborted} left`);
    tile("waiting", figures.waiting, "", `${figures.totals.preemptions} preempted in all`);
    tile("speed", rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"), "", `${figures.totals.generation_tokens.toLocaleString("en")} in all`);
    for (const name of ["ttft", "itl"]) {
      const times = figures[`${name}_s`];
      tile(name, ...duration(times?.p50), times ? `p95 ${duration(times.p95).join(" ")}` : "none in the last 10 s");
      $(`${name}-sub`).textContent = times ? `p50 ${duration(times.p50).join(" ")} · p95 ${duration(times.p95).join(" ")}` : "p50 and p95";
    }
    const share = figures.active_share;
    tile("active", share ? (share * 100).toFixed(share > 0.995 ? 2 : 1) : "–", share ? "%" : "", worst(figures.idle_s));
    $("speed-sub").textContent = "over 2 s";
    $("timeline-sub").textContent = `${figures.device ?? ""} · depth ${figures.depth} · ${figures.totals.steps.toLocaleString("en")} steps`;
    showBlocks(figures.kv);
    showRequests(figures);
    for (const chart of Object.values(charts)) chart.draw();
  }

  function showBlocks(kv) {
    const used = kv.num_blocks ? (kv.owned / kv.num_blocks) * 100 : 0;
    $("kv-sub").textContent = `${used.toFixed(1)} % of ${kv.num_blocks.toLocaleString("en")} blocks of ${kv.block_size}`;
    drawBlocks($("kv"), kv);
    const named = (name) => `${name} ${kv[name].toLocaleString("en")}`;
    legend($("kv-legend"), [["slot-0", named("owned")], ["cached", named("cached")], ["sunk", named("free")]]);
  }

  $("pause").addEventListener("click", () => {
    const paused = timeline.toggle();
    $("pause").setAttribute("aria-pressed", String(paused));
    $("pause").textContent = paused ? "Go on" : "Pause";
  });
  $("zoom-in").addEventListener("click", () => timeline.zoom(-1));
  $("zoom-out").addEventListener("click", () => timeline.zoom(1));
  $("timeline").addEventListener("keydown", (event) => {
    const act = {
      " ": () => $("pause").click(), "+": () => timeline.zoom(-1), "=": () => timeline.zoom(-1), "-": () => timeline.zoom(1),
      ArrowLeft: () => timeline.pan(-0.2), ArrowRight: () => timeline.pan(0.2),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
  timeline.onWindow = (ms) => ($("zoom").textContent = ms < 1000 ? `${ms} ms` : `${ms / 1000} s`);
  timeline.zoom(0);
  showLegend(2);
  addEventListener("tandem-view", () => {
    timeline.run(visible());
    poll();
  });
  document.addEventListener("visibilitychange", () => {
    timeline.run(visible());
    poll();
  });
  addEventListener("tandem-theme", () => timeline.colours());
}

function worst(idle) {
  const known = Object.entries(idle).filter(([cause, seconds]) => cause !== "nothing" && seconds > 0);
  if (!known.length) return "no wait yet";
  const [cause] = known.reduce((most, entry) => (entry[1] > most[1] ? entry : most));
  return `waits most for ${CAUSES[cause]}`;
}

function showRequests(figures) {
  const rows = figures.visits.map((visit) => {
    const row = document.createElement("tr");
    const begun = visit.ttft_s !== null;
    const state = document.createElement("span");
    state.className = `state ${begun ? "on" : ""}`;
    state.textContent = begun ? "decoding" : "waiting";
    const cells = [
      `#${visit.number}${visit.answers > 1 ? ` × ${visit.answers}` : ""}`, state, visit.prompt_tokens, visit.tokens,
      duration(visit.ttft_s).join(" "), duration(visit.age_s).join(" "),
    ];
    cells.forEach((cell, i) => {
      const box = document.createElement("td");
      if (i > 1) box.className = "num";
      box.append(cell instanceof Node ? cell : String(cell));
      row.append(box);
    });
    return row;
  });
  if (!rows.length) {
    const row = document.createElement("tr"), cell = document.createElement("td");
    cell.colSpan = 6;
    cell.className = "empty";
    cell.textContent = "Nobody is being answered now.";
    row.append(cell);
    rows.push(row);
  }
  $("requests").replaceChildren(...rows);
  const more = figures.open - figures.visits.length;
  $("requests-sub").textContent = `${figures.open} open${more > 0 ? `, ${more} more than shown` : ""}`;
}
