// The map of the experts: a cell for each, a band of rows for each layer. The colour says where an
// expert is, its strength how much it was used lately; it flashes when it is used.

/** By the digit of the server. */
export const PLACES = ["disk", "flight", "part", "ram", "vram"];
export const NAMES = ["on disk", "on its way", "in RAM in part", "in RAM", "in VRAM"];

/** Time of a flash, ms, and the half-life of use. */
const FLASH = 250;
const HALF_LIFE = 5000;
/** Height that the map may take before its cells become smaller. */
const MAX_HEIGHT = 430;
/** The least size of a cell for which a layer is kept in one row. */
const MIN_ROW = 5;

export class Heatmap {
  /** `onhover` hears of the cell that is pointed at, `null` if none is. */
  constructor(canvas, onhover) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.onhover = onhover;
    this.n = 0;
    this.cursor = -1;
    this.isDrawing = false;
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.lay()).observe(canvas.parentElement);
  }

  /** Takes in all experts: the server's first event. */
  reset({ layers, places, hits, misses }) {
    this.layers = layers;
    this.n = hits.length;
    this.hits = Float64Array.from(hits);
    this.misses = Float64Array.from(misses);
    this.places = Uint8Array.from(places.join(""), Number);
    this.heat = new Float32Array(this.n);
    this.heatTime = new Float64Array(this.n);
    this.flash = new Float64Array(this.n).fill(-FLASH);
    this.isMiss = new Uint8Array(this.n);
    this.of = new Uint16Array(this.n);
    let first = 0;
    this.first = layers.map(({ n_experts: n }, band) => {
      this.of.fill(band, first, first + n);
      first += n;
      return first - n;
    });
    this.width = 0;
    this.lay();
  }

  /** Takes in changes: index, place, hits and misses of each. */
  apply(cells) {
    const now = performance.now();
    for (let at = 0; at < cells.length; at += 4) {
      const [i, place, hits, misses] = [cells[at], cells[at + 1], cells[at + 2], cells[at + 3]];
      this.places[i] = place;
      this.hits[i] += hits;
      this.misses[i] += misses;
      if (hits + misses) {
        this.heat[i] = this.heatOf(i, now) + hits + misses;
        this.heatTime[i] = now;
        this.flash[i] = now;
        this.isMiss[i] = misses > 0 ? 1 : 0;
      }
    }
    this.draw();
  }

  heatOf(i, now) {
    return this.heat[i] * 2 ** ((this.heatTime[i] - now) / HALF_LIFE);
  }

  /** Experts by place. */
  counts() {
    const counts = PLACES.map(() => 0);
    for (let i = 0; i < this.n; i++) counts[this.places[i]]++;
    return counts;
  }

  /** Chooses the size of a cell: a layer is one row if it fits, else the map must not be too high. */
  lay() {
    const width = this.canvas.parentElement.clientWidth - 28;
    if (!this.n || width <= 0 || width === this.width) return;
    this.width = width;
    const most = Math.max(...this.layers.map((layer) => layer.n_experts));
    const row = Math.floor(width / most);
    for (this.size = row >= MIN_ROW ? Math.min(16, row) : 16; this.size > 3; this.size--) {
      if (this.place(most) <= MAX_HEIGHT) break;
    }
    const height = this.place(most);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.draw();
  }

  /** Places the bands, whose rows are alike; the height of all. */
  place(most) {
    const rows = Math.ceil(most / Math.floor(this.width / this.size));
    this.columns = Math.ceil(most / rows);
    const gap = this.size > 6 ? 2 : 1;
    let y = 0;
    this.top = this.layers.map(({ n_experts: n }) => {
      const top = y;
      y += Math.ceil(n / this.columns) * this.size + gap;
      return top;
    });
    return y;
  }

  at(event) {
    if (!this.n) return -1;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const band = this.top.findLastIndex((top) => top <= y);
    const column = Math.floor(x / this.size);
    if (band < 0 || column >= this.columns || column < 0) return -1;
    const expert = Math.floor((y - this.top[band]) / this.size) * this.columns + column;
    return expert < this.layers[band].n_experts ? this.first[band] + expert : -1;
  }

  point(i) {
    if (i === this.cursor) return;
    this.cursor = i;
    this.draw();
    this.onhover(this.about(i));
  }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const step = steps[event.key];
    if (!step || !this.n) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(this.n - 1, Math.max(this.cursor, 0) + step)));
  }

  about(i) {
    if (i < 0 || i >= this.n) return null;
    const { layer } = this.layers[this.of[i]];
    const [hits, misses] = [this.hits[i], this.misses[i]];
    return { layer, expert: i - this.first[this.of[i]], place: NAMES[this.places[i]], uses: hits + misses, misses };
  }

  /** Draws as long as something flashes. */
  draw() {
    if (this.isDrawing || !this.n) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      if (this.paint(performance.now())) this.draw();
    });
  }

  paint(now) {
    const { context, size } = this;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const places = PLACES.map(colour);
    const [hit, miss] = [colour("hit"), colour("miss")];
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const inner = size > 4 ? size - 1 : size - 0.5;
    let isMoving = false;
    context.clearRect(0, 0, this.width, this.canvas.height);
    for (let i = 0; i < this.n; i++) {
      const band = this.of[i];
      const expert = i - this.first[band];
      const x = (expert % this.columns) * size;
      const y = this.top[band] + Math.floor(expert / this.columns) * size;
      const heat = Math.min(1, this.heatOf(i, now) / 6);
      context.globalAlpha = this.places[i] === 0 ? 1 : 0.45 + 0.55 * heat;
      context.fillStyle = places[this.places[i]];
      context.fillRect(x, y, inner, inner);
      const age = now - this.flash[i];
      if (age < FLASH) {
        isMoving = true;
        context.globalAlpha = still ? 0.8 : 1 - age / FLASH;
        context.fillStyle = this.isMiss[i] ? miss : hit;
        context.fillRect(x, y, inner, inner);
      }
      if (i === this.cursor) {
        context.globalAlpha = 1;
        context.strokeStyle = colour("focus");
        context.lineWidth = 2;
        context.strokeRect(x, y, inner, inner);
      }
    }
    context.globalAlpha = 1;
    return isMoving;
  }
}
