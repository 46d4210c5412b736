// Host and device over time, scrolling: four lanes, two slots in turn. Knows moments and pixels.
//
//   host     plan │submit│ wait │settle      compute  ██ step ██ in the colour of its slot; a gap is the device waiting
//
// Moments are microseconds on the engine's clock. The picture runs a little behind the newest figures, so that it moves
// evenly although they come in bursts.

import { colour, prepare } from "./charts.js";

const LANES = ["host", "in", "compute", "out"];
const WINDOWS_MS = [20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const LAG_US = 450_000, KEPT = 4000, LABEL = 62, SLOTS = 4;
const NAMES = ["plan", "submit", "wait", "settle", "idle", "grid", "ink", "soft", "faint", "card", "sans", "mono", "slot-0", "slot-1", "slot-2", "slot-3"];
const [STEP, SPANS, TOKENS, DECODES, PLAN, PLANNED, SUBMITTED, WAIT, HOME_HOST, SETTLED, READY, BEGAN, COMPUTED, HOME] = Array(14).keys();

export class Timeline {
  steps = [];
  depth = 2;
  window = 4;
  chosen = false;
  onWindow = () => {};

  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.clock = null;
    this.paused = null;
    this.pointer = null;
    this.running = false;
    this.colours();
    canvas.addEventListener("pointermove", (event) => (this.pointer = [event.offsetX, event.offsetY]));
    canvas.addEventListener("pointerleave", () => (this.pointer = null));
  }

  colours() {
    this.colour = Object.fromEntries(NAMES.map((name) => [name, colour(name)]));
  }

  /** Takes the figures of one poll; the local clock is fitted to the engine's, never to run back. */
  add({ steps, now_us, depth }) {
    this.depth = depth;
    if (!now_us) return;
    const offset = now_us - performance.now() * 1000;
    if (this.clock === null || Math.abs(offset - this.clock) > 1e6) this.clock = offset;
    else this.clock += (offset - this.clock) * 0.1;
    this.steps.push(...steps);
    if (!this.chosen && this.steps.length > 8) this.choose();
    if (this.steps.length > KEPT) this.steps.splice(0, this.steps.length - KEPT);
    if (this.still) this.draw();
  }

  /** A window that shows about a dozen steps, until somebody zooms. */
  choose() {
    const lengths = this.steps.slice(-40).map((step) => step[COMPUTED] - step[BEGAN]).sort((a, b) => a - b);
    const wanted = (lengths[lengths.length >> 1] * 14) / 1000;
    const fits = WINDOWS_MS.findIndex((ms) => ms >= wanted);
    this.window = fits < 0 ? WINDOWS_MS.length - 1 : fits;
    this.chosen = true;
    this.onWindow(WINDOWS_MS[this.window]);
  }

  toggle() {
    this.paused = this.paused === null ? this.end() : null;
    return this.paused !== null;
  }

  zoom(by) {
    this.chosen ||= by !== 0;
    this.window = Math.min(WINDOWS_MS.length - 1, Math.max(0, this.window + by));
    this.onWindow(WINDOWS_MS[this.window]);
    this.draw();
  }

  pan(share) {
    if (this.paused === null) return;
    this.paused += share * WINDOWS_MS[this.window] * 1000;
    this.draw();
  }

  run(running) {
    if (running && !this.running) {
      this.running = true;
      requestAnimationFrame(() => this.frame());
    }
    this.running = running;
  }

  frame() {
    if (!this.running) return;
    if (!this.still || this.paused !== null) this.draw();
    requestAnimationFrame(() => this.frame());
  }

  /** The moment at the right edge. */
  end() {
    return this.paused ?? performance.now() * 1000 + (this.clock ?? 0) - LAG_US;
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    const span = WINDOWS_MS[this.window] * 1000, end = this.end(), begin = end - span;
    const foot = 22, tall = (height - foot) / LANES.length, scale = (width - LABEL) / span;
    const x = (moment) => LABEL + (moment - begin) * scale;
    const area = { pen, x, tall, width, scale };
    this.axis(pen, begin, end, x, height - foot, height);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL, height - foot);
    pen.clip();
    let before = null, hit = null, seen = 0;
    for (const step of this.steps) {
      const last = Math.max(step[SETTLED], step[HOME]);
      if (last >= begin && step[PLAN] <= end) {
        this.step(area, step, before);
        seen += 1;
        if (this.pointer && this.pointer[0] >= x(step[BEGAN]) && this.pointer[0] <= x(step[COMPUTED])) hit = step;
      }
      before = step;
    }
    pen.restore();
    this.labels(pen, tall);
    if (!seen) this.empty(pen, width, height - foot);
    this.showTip(hit, width);
  }

  step({ pen, x, tall, width, scale }, step, before) {
    const slot = step[STEP] % this.depth, fill = this.colour[`slot-${slot % SLOTS}`];
    const bar = (lane, from, to, name) => {
      if (!(to > from && from > 0)) return 0;
      const left = Math.max(x(from), LABEL - 4), right = Math.min(x(to), width + 4), wide = Math.max(right - left, 0.8);
      if (right < LABEL || left > width) return 0;
      pen.fillStyle = name;
      pen.beginPath();
      pen.roundRect(left, lane * tall + 7, wide, tall - 14, Math.min(4, wide / 3));
      pen.fill();
      return wide;
    };
    if (before && before[COMPUTED] && step[BEGAN] - before[COMPUTED] > 0 && before[STEP] === step[STEP] - 1) {
      bar(2, before[COMPUTED], step[BEGAN], this.colour.idle);
    }
    bar(0, step[WAIT], step[HOME_HOST], this.colour.wait);
    const planned = bar(0, step[PLAN], step[PLANNED], this.colour.plan);
    bar(0, step[PLANNED], step[SUBMITTED], this.colour.submit);
    bar(0, step[HOME_HOST], step[SETTLED], this.colour.settle);
    bar(1, step[SUBMITTED], step[READY], fill);
    const wide = bar(2, step[BEGAN], step[COMPUTED], fill);
    bar(3, step[COMPUTED], step[HOME], fill);
    if (wide > 46) {
      pen.fillStyle = this.colour.card;
      pen.font = `600 12px ${this.colour.sans}`;
      pen.textAlign = "center";
      pen.fillText(`${step[STEP]} ${String.fromCharCode(65 + slot)}`, (x(step[BEGAN]) + x(step[COMPUTED])) / 2, 2.5 * tall + 4);
    }
    if (planned > 60) {
      pen.fillStyle = this.colour.card;
      pen.font = `11px ${this.colour.sans}`;
      pen.fillText("plan", (x(step[PLAN]) + x(step[PLANNED])) / 2, 0.5 * tall + 4);
    }
  }

  axis(pen, begin, end, x, top, height) {
    const span = end - begin, rough = (span * 95) / (x(end) - LABEL), power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((times) => times * power).find((value) => value >= rough);
    pen.font = `11px ${this.colour.sans}`;
    pen.textAlign = "center";
    for (let moment = Math.ceil(begin / every) * every; moment < end; moment += every) {
      const at = Math.round(x(moment)) + 0.5;
      pen.strokeStyle = this.colour.grid;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, top);
      pen.stroke();
      pen.fillStyle = this.colour.faint;
      const ms = (moment / 1000) % 100000;
      if (at > LABEL + 16 && at < x(end) - 24) pen.fillText(span > 1.5e6 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`, at, height - 5);
    }
  }

  labels(pen, tall) {
    pen.textAlign = "left";
    pen.font = `12.5px ${this.colour.sans}`;
    pen.fillStyle = this.colour.soft;
    LANES.forEach((name, lane) => pen.fillText(name, 0, (lane + 0.5) * tall + 4));
  }

  empty(pen, width, height) {
    pen.textAlign = "center";
    pen.font = `13px ${this.colour.sans}`;
    pen.fillStyle = this.colour.faint;
    pen.fillText("No step in this window. Ask something in the chat.", (width + LABEL) / 2, height / 2 + 4);
  }

  showTip(step, width) {
    this.tip.hidden = !step;
    if (!step) return;
    const ms = (from, to) => `${((step[to] - step[from]) / 1000).toFixed(3)} ms`;
    this.tip.textContent = [
      `step ${step[STEP]}, slot ${String.fromCharCode(65 + (step[STEP] % this.depth))}`,
      `${step[SPANS]} requests, ${step[TOKENS]} tokens, ${step[DECODES]} decodes`,
      `plan ${ms(PLAN, PLANNED)}, submit ${ms(PLANNED, SUBMITTED)}`,
      `compute ${ms(BEGAN, COMPUTED)}, settle ${ms(HOME_HOST, SETTLED)}`,
    ].join("\n");
    this.tip.style.left = `${Math.min(this.pointer[0] + 14, width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${this.pointer[1] + 14}px`;
  }
}
