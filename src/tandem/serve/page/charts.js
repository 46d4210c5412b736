// Small charts on canvas: lines over the last two minutes, and blocks by state. Knows numbers and pixels.

const SPAN_S = 120, LEAST_S = 20;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A canvas as sharp as the screen; returns its context in CSS pixels. */
export function prepare(canvas) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** 1, 2 or 5 times a power of ten, at least the value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= value * 0.9999);
}

export class Chart {
  samples = [];

  constructor(canvas, kind) {
    this.canvas = canvas;
    this.kind = kind;
  }

  add(now, values) {
    this.samples.push([now, ...values]);
    while (this.samples.length && now - this.samples[0][0] > SPAN_S) this.samples.shift();
  }

  label(value) {
    if (this.kind === "count") return value >= 1000 ? `${value / 1000}k` : `${+value.toPrecision(2)}`;
    return value >= 1 ? `${+value.toPrecision(2)} s` : `${+(value * 1000).toPrecision(2)} ms`;
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    const now = this.samples.at(-1)?.[0] ?? 0, foot = 16, head = 6;
    const span = Math.min(SPAN_S, Math.max(LEAST_S, now - (this.samples[0]?.[0] ?? now)));
    const most = Math.max(0, ...this.samples.flatMap(([, ...values]) => values.filter((value) => value > 0)));
    const top = most > 0 ? roundUp(most * 1.05) : this.kind === "count" ? 10 : 0.1;
    const x = (when) => width - ((now - when) / span) * width;
    const y = (value) => height - foot - (value / top) * (height - foot - head);
    pen.font = `11px ${colour("sans")}`;
    pen.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      pen.strokeStyle = colour("grid");
      pen.beginPath();
      pen.moveTo(0, Math.round(y(top * share)) + 0.5);
      pen.lineTo(width, Math.round(y(top * share)) + 0.5);
      pen.stroke();
    }
    const count = (this.samples[0]?.length ?? 1) - 1;
    for (let line = count; line >= 1; line -= 1) this.line(pen, line, x, y, line === 1 ? "slot-0" : "slot-1", height - foot);
    pen.fillStyle = colour("faint");
    pen.textAlign = "left";
    pen.fillText(this.label(top), 0, y(top) + 11);
    pen.fillText(span === SPAN_S ? "2 min ago" : `${Math.round(span)} s ago`, 0, height - 3);
    pen.textAlign = "right";
    pen.fillText("now", width, height - 3);
    this.canvas.setAttribute("aria-label", `${this.canvas.id} over the last two minutes, up to ${this.label(most || 0)}`);
  }

  line(pen, index, x, y, name, floor) {
    let open = false, from = 0;
    const path = new Path2D();
    for (const sample of this.samples) {
      const value = sample[index];
      if (value === undefined || value === null) {
        open = false;
        continue;
      }
      if (open) path.lineTo(x(sample[0]), y(value));
      else path.moveTo((from = x(sample[0])), y(value));
      open = true;
    }
    pen.strokeStyle = colour(name);
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.stroke(path);
    if (this.kind === "count" && this.samples.length > 1 && open) {
      path.lineTo(x(this.samples.at(-1)[0]), floor);
      path.lineTo(from, floor);
      pen.globalAlpha = 0.12;
      pen.fillStyle = colour(name);
      pen.fill(path);
      pen.globalAlpha = 1;
    }
  }
}

/** A grid of cells, each for as many blocks: owned ones first, then cached, then free. */
export function drawBlocks(canvas, kv) {
  const { pen, width, height } = prepare(canvas);
  const size = 11, gap = 3, across = Math.max(1, Math.floor((width + gap) / (size + gap)));
  const down = Math.max(1, Math.floor((height + gap) / (size + gap)));
  const cells = Math.min(across * down, kv.num_blocks), total = kv.num_blocks || 1;
  const share = (count) => (count ? Math.max(1, Math.round((count / total) * cells)) : 0);
  const owned = share(kv.owned), cached = share(kv.cached);
  for (let i = 0; i < cells; i += 1) {
    pen.fillStyle = colour(i < owned ? "slot-0" : i < owned + cached ? "cached" : "sunk");
    pen.beginPath();
    pen.roundRect((i % across) * (size + gap), Math.floor(i / across) * (size + gap), size, size, 3);
    pen.fill();
  }
  canvas.setAttribute("aria-label", `KV blocks: ${kv.owned} owned, ${kv.cached} cached, ${kv.free} free of ${kv.num_blocks}`);
}
