// A chart and what can be done with it: point, switch the view, hide curves, walk by keys.
class Chart {
  constructor(figure, data) {
    this.data = data;
    this.view = 0;
    this.hidden = new Set();
    this.active = null;
    this.plot = figure.querySelector(".plot");
    this.svg = figure.querySelector("svg");
    this.tip = html(this.plot, "div", { className: "tip", hidden: true });
    this.tip.setAttribute("role", "status");
    this.clip = `clip-${figure.dataset.chart}`;
    this.addViews(figure.querySelector(".views"));
    this.addLegend(figure.querySelector(".legend"));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.show(null);
    });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.show(null));
    document.addEventListener("pointerdown", (event) => {
      if (!this.plot.contains(event.target)) this.show(null);
    });
    new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
    this.draw();
  }

  addViews(parent) {
    if (this.data.views.length < 2) return;
    const buttons = this.data.views.map((view, place) => {
      const button = html(parent, "button", { type: "button", textContent: view.name });
      button.addEventListener("click", () => {
        this.view = place;
        press();
        this.draw();
      });
      return button;
    });
    const press = () => buttons.forEach((b, i) => b.setAttribute("aria-pressed", i === this.view));
    press();
  }

  addLegend(parent) {
    this.data.series.forEach((series, place) => {
      const button = html(parent, "button", { type: "button", title: "show or hide" });
      swatch(button, this.svg, series);
      html(button, "span", { textContent: series.name });
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const shown = this.hidden.delete(place);
        if (!shown) this.hidden.add(place);
        button.setAttribute("aria-pressed", shown);
        this.draw();
      });
    });
  }

  // the visible points that have a value in this view, with their places on the screen
  points() {
    const view = this.view;
    return this.data.series.flatMap((series, place) =>
      this.hidden.has(place)
        ? []
        : series.points
            .filter((one) => one.y[view] !== null)
            .map((one) => ({ ...one, series, place, value: one.y[view], spread: one.std[view] })),
    );
  }

  yRange(points) {
    const view = this.data.views[this.view];
    if (!points.length) return { low: 0, high: 1, step: 0.5, cut: false };
    let low = Math.min(...points.map((one) => one.value - one.spread));
    let high = Math.max(...points.map((one) => one.value + one.spread));
    const cut = view.floor !== null && low < view.floor;
    if (cut) [low, high] = [view.floor, Math.max(high, view.floor + 1)];
    if (high - low < 1e-9) [low, high] = [low - Math.abs(low) * 0.1 - 1e-3, high + 1e-3];
    const step = niceStep(high - low, 6);
    low = step * Math.floor(low / step + 1e-9);
    high = step * Math.ceil(high / step - 1e-9);
    return { low, high, step, cut };
  }

  draw() {
    this.show(null);
    this.width = this.plot.clientWidth;
    const width = Math.max(this.width, 200);
    const height = Math.round(Math.min(400, Math.max(260, width * 0.52)));
    const points = this.points();
    const { low, high, step, cut } = this.yRange(points);
    const axis = this.data.views[this.view].x ?? this.data.x;
    const { label, min, max } = axis;
    const area = { left: 46, right: width - 14, top: 30, bottom: height - 44 };
    const px = (x) => area.left + ((x - min) / (max - min)) * (area.right - area.left);
    const py = (y) => area.bottom - ((y - low) / (high - low)) * (area.bottom - area.top);
    this.svg.replaceChildren();
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
      this.svg.setAttribute(name, value);
    const frame = { x: area.left - 8, y: area.top - 8 };
    const size = { width: area.right - area.left + 16, height: area.bottom - area.top + 16 };
    shape(shape(this.svg, "clipPath", { id: this.clip }), "rect", { ...frame, ...size });
    const text = (x, y, anchor, content) =>
      (shape(this.svg, "text", { x, y, "text-anchor": anchor }).textContent = content);
    for (const tick of ticks(low, high, step)) {
      shape(this.svg, "path", { d: `M${area.left} ${py(tick.value)}H${area.right}`, class: "grid" });
      text(area.left - 8, py(tick.value) + 4, "end", tick.text);
    }
    const xStep = Math.max(niceStep(max - min, width < 480 ? 5 : 10), axis.least);
    for (const tick of ticks(min, max, xStep)) {
      shape(this.svg, "path", { d: `M${px(tick.value)} ${area.bottom}v5`, class: "axis" });
      text(px(tick.value), area.bottom + 19, "middle", tick.text);
    }
    shape(this.svg, "path", { d: `M${area.left} ${area.bottom}H${area.right}`, class: "axis" });
    const below = cut ? "; lower ones not shown" : "";
    text(4, 14, "start", this.data.views[this.view].label + below);
    text((area.left + area.right) / 2, height - 6, "middle", label);
    this.placed = points
      .filter((one) => !one.series.front) // its points are those of other series
      .map((one) => ({ ...one, px: px(one.x), py: py(one.value) }))
      .filter((one) => one.py <= area.bottom + 1);
    const inside = shape(this.svg, "g", { "clip-path": `url(#${this.clip})` });
    this.data.series.forEach((series, place) => {
      const mine = points.filter((one) => one.place === place);
      if (mine.length) this.drawSeries(inside, mine, px, py);
    });
    this.ring = shape(this.svg, "circle", { r: 9, class: "ring", visibility: "hidden" });
  }

  drawSeries(parent, mine, px, py) {
    const look = paint(mine[0].series.style);
    const line = mine.map((one) => `${px(one.x)} ${py(one.value)}`).join("L");
    const attributes = { d: `M${line}`, class: "line", stroke: look.color };
    const { line: joined, front } = mine[0].series;
    if (joined !== false)
      shape(parent, "path", { ...attributes, "stroke-dasharray": look.dash });
    if (front) return;
    for (const one of mine) {
      const x = px(one.x);
      if (one.spread > 0) {
        const [top, bottom] = [py(one.value + one.spread), py(one.value - one.spread)];
        const d = `M${x - 4} ${top}h8M${x} ${top}V${bottom}M${x - 4} ${bottom}h8`;
        shape(parent, "path", { d, class: "bar", stroke: look.color });
      }
      if (mine.length <= 25 || joined === false) {
        const transform = `translate(${x} ${py(one.value)})`;
        shape(parent, "path", { d: look.marker, transform, fill: look.color, class: "marker" });
      }
    }
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = event.pointerType === "touch" ? Infinity : REACH;
    for (const one of this.placed) {
      const distance = Math.hypot(one.px - x, one.py - y);
      if (distance < least) [best, least] = [one, distance];
    }
    this.show(best);
  }

  key(event) {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.show(null);
    if (!along || !this.placed.length) return;
    event.preventDefault();
    const count = this.placed.length;
    const at = this.active ? this.placed.indexOf(this.active) : along > 0 ? -1 : count;
    this.show(this.placed[(at + along + count) % count]);
  }

  show(one) {
    this.active = one;
    this.tip.hidden = !one;
    if (this.ring) this.ring.setAttribute("visibility", one ? "visible" : "hidden");
    if (!one) return;
    this.ring.setAttribute("cx", one.px);
    this.ring.setAttribute("cy", one.py);
    this.tip.replaceChildren();
    const head = html(this.tip, "strong", { textContent: one.series.name });
    head.style.color = paint(one.series.style).color;
    const list = html(this.tip, "dl", {});
    for (const [name, value] of one.text) {
      html(list, "dt", { textContent: name });
      html(list, "dd", { textContent: value });
    }
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    const right = one.px + 16 <= room ? one.px + 16 : one.px - 16 - this.tip.offsetWidth;
    const high = one.py > this.plot.clientHeight / 2;
    const down = high ? one.py - 14 - this.tip.offsetHeight : one.py + 14;
    this.tip.style.left = `${Math.max(0, Math.min(right, room))}px`;
    this.tip.style.top = `${down}px`;
  }
}

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const figure of document.querySelectorAll("[data-chart]"))
  new Chart(figure, charts[figure.dataset.chart]);
